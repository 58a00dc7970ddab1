#!/usr/bin/env bash
# Writes images/*.lock anew: the newest versions that pyproject.toml allows, with the hashes of all their files, for
# every Python and processor. They name no index: any that serves the same files will do.
#
#   lock.sh                       all three
#   lock.sh agent NAME URL        images/agent-NAME.lock, with the torch of another index, such as a CPU-only one:
#                                 build with --build-arg AGENT_LOCK=images/agent-NAME.lock and PIP_EXTRA_INDEX_URL=URL
#   UV=uv                         the program that resolves
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# lock FILE SOURCE [ARG...]
lock() {
  local file=images/$1.lock made
  made=$(mktemp)
  "${UV:-uv}" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
    --no-emit-index-url --output-file "$made" "${@:2}" >/dev/null
  { echo "# Made by \`make lock\`."; cat "$made"; } >"$file"
  rm "$made"
  echo "$file: $(grep -c == "$file") packages"
}

case ${1:-} in
'')
  # pip and the build backend. pyproject.toml names the backend where no resolver looks.
  lock build - <<<$'pip>=25\nhatchling>=1.25'
  lock operator pyproject.toml --extra operator
  lock agent pyproject.toml --extra agent
  ;;
agent) lock "agent-$2" pyproject.toml --extra agent --extra-index-url "$3" --index-strategy unsafe-best-match ;;
*) sed -n '2,/^set/{/^#/p}' "$0" | cut -c3- >&2 && exit 2 ;;
esac
