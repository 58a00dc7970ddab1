#!/usr/bin/env bash
# A Kubernetes of one node on this machine, without Docker: etcd, the control plane, kube-proxy, CoreDNS, and a kubelet
# on containerd, as root, in a network namespace and a cgroup of their own. It has no route out of this machine. The
# node has 8 nvidia.com/gpu that do not exist.
#
#   cluster.sh up             builds and installs what is missing, starts, waits until pods can run
#   cluster.sh down           ends all of it and removes its state; images that were loaded are kept for the next one
#   cluster.sh status         the servers, the node and the pods
#   cluster.sh images         builds the images of this tree (images.sh) and loads them
#   cluster.sh load TAR       imports an archive of an image (docker or OCI)
#   cluster.sh restart NAME   kill -9 of one server, and its start
#   cluster.sh kubectl ...    kubectl as the cluster's admin
#   cluster.sh kubeconfig     where its configuration for kubectl is
#   cluster.sh why-not        why no pods can run on this machine; nothing where they can
#
# WEIGHTSYNC_CLUSTER_STATE  its folder (default ~/.cache/weightsync/state): admin.kubeconfig, containerd.sock, log/.
#                           At most 60 characters: it holds Unix sockets.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weightsync
state=$(realpath -m "${WEIGHTSYNC_CLUSTER_STATE:-$cache/state}")
kubeconfig=$state/admin.kubeconfig
socket=$state/containerd.sock
pki=$state/pki conf=$state/conf log=$state/log run=$state/run
store=$cache/containerd # images outlive a cluster: loading one of some GB takes minutes

name=weightsync # of the network namespace, of its link, and of the cgroup
node=node-1
gpus=8
host_ip=10.254.0.1 node_ip=10.254.0.2 # of the link, a /30
pod_cidr=10.244.0.0/24 service_cidr=10.96.0.0/16
servers=(etcd kube-apiserver kube-controller-manager kube-scheduler containerd kubelet kube-proxy coredns device-plugin network-policies)
# What the kubelet sets for the whole machine, and `down` sets back.
kernel=(vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys kernel.keys.root_maxbytes)
watched= # whether a server that ends makes all waiting vain
needed=(containerd runc containernetworking-plugins nftables iptables conntrack iproute2 procps openssl)

if [ -e /sys/fs/cgroup/cgroup.controllers ]; then cgroup=/sys/fs/cgroup/$name; else cgroup=/sys/fs/cgroup/pids/$name; fi

say() { echo "cluster: $*" >&2; }
kubectl() { "$bin/kubectl" --kubeconfig "$kubeconfig" "$@"; }
ctr() { command ctr --address "$socket" --namespace k8s.io "$@"; }

# until_true SECONDS COMMAND...: tries until it succeeds
until_true() {
  local deadline=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ -z "$watched" ] || all_run || return 1
    ((SECONDS < deadline)) || { say "gave up waiting for: $*"; return 1; }
    sleep 0.2
  done
}

# --- what it needs of the machine -----------------------------------------------------------------------------------

# why_not: why no pods can run here; nothing where they can
why_not() {
  local package
  [ "$(uname -s)" = Linux ] || { echo "pods need Linux"; return; }
  [ "$(id -u)" = 0 ] || { echo "pods need root: sudo make cluster"; return; }
  unshare --net --mount true 2>/dev/null || { echo "no network and mount namespaces can be made here"; return; }
  ((${#state} <= 60)) || { echo "WEIGHTSYNC_CLUSTER_STATE is too long for Unix sockets: $state"; return; }
  [ ! -e "/run/netns/$name" ] || [ -e "$conf/done" ] || { echo "another WEIGHTSYNC_CLUSTER_STATE has a cluster here"; return; }
  [ -e "$conf/done" ] || [ ! -e /var/lib/kubelet/device-plugins/kubelet.sock ] || { echo "this machine has a kubelet already"; return; }
  for package in $(missing); do
    command -v apt-get >/dev/null || { echo "$package is missing, and there is no apt-get to install it"; return; }
  done
}

missing() {
  local package
  command -v dpkg-query >/dev/null || { command -v containerd >/dev/null || echo containerd; return; }
  for package in "${needed[@]}"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || echo "$package"
  done
}

packages() {
  local names
  names=$(missing)
  [ -z "$names" ] && return
  say "installing ${names//$'\n'/ }"
  # A machine that has just started often updates itself first.
  local -a apt=(apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
  "${apt[@]}" update
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends $names >/dev/null
}

# --- configuration --------------------------------------------------------------------------------------------------

key_pair() { openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 "$@" 2>/dev/null; }

# certificate NAME SUBJECT [ALTERNATIVE NAMES], signed by the cluster's authority
certificate() {
  key_pair -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -subj "$2" -keyout "$pki/$1.key" -out "$pki/$1.crt" \
    -addext "subjectAltName=${3:-DNS:$1}" -addext basicConstraints=critical,CA:FALSE \
    -addext extendedKeyUsage=clientAuth,serverAuth
}

# client NAME SUBJECT FILE: a kubeconfig
client() {
  certificate "$1" "$2"
  cat >"$3" <<-YAML
	apiVersion: v1
	kind: Config
	current-context: $name
	contexts: [{name: $name, context: {cluster: $name, user: $1}}]
	clusters: [{name: $name, cluster: {server: "https://$node_ip:6443", certificate-authority-data: $(base64 -w0 "$pki/ca.crt")}}]
	users: [{name: $1, user: {client-certificate-data: $(base64 -w0 "$pki/$1.crt"), client-key-data: $(base64 -w0 "$pki/$1.key")}}]
	YAML
  chmod 600 "$3"
}

configure() {
  [ -e "$conf/done" ] && return
  mkdir -p "$state" "$conf/cni" "$log/pods" "$run" "$store"
  (umask 077 && mkdir -p "$pki")
  key_pair -subj "/CN=$name" -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature -keyout "$pki/ca.key" -out "$pki/ca.crt"
  openssl ecparam -genkey -name prime256v1 -noout -out "$pki/sa.key"
  openssl ec -in "$pki/sa.key" -pubout -out "$pki/sa.pub" 2>/dev/null
  certificate apiserver /CN=kube-apiserver "IP:$node_ip,IP:${service_cidr%.*}.1,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
  certificate kubelet-server "/CN=$node" "IP:$node_ip,DNS:$node"
  certificate kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client
  client admin /O=system:masters/CN=admin "$kubeconfig"
  client controller-manager /CN=system:kube-controller-manager "$conf/controller-manager.kubeconfig"
  client scheduler /CN=system:kube-scheduler "$conf/scheduler.kubeconfig"
  client kubelet "/O=system:nodes/CN=system:node:$node" "$conf/kubelet.kubeconfig"
  client kube-proxy /CN=system:kube-proxy "$conf/kube-proxy.kubeconfig"
  client coredns /CN=coredns "$conf/coredns.kubeconfig"
  client network-policies /CN=network-policies "$conf/network-policies.kubeconfig"

  # Root may lack CAP_SYS_RESOURCE, which runc needs for a negative oom_score_adj: hence the restriction.
  cat >"$conf/containerd.toml" <<-TOML
	version = 2
	root = "$store"
	state = "$run/containerd"
	disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs"]
	[grpc]
	address = "$socket"
	[plugins."io.containerd.grpc.v1.cri"]
	sandbox_image = "localhost/pause:1"
	netns_mounts_under_state_dir = true
	restrict_oom_score_adj = true
	[plugins."io.containerd.grpc.v1.cri".cni]
	bin_dir = "/usr/lib/cni"
	conf_dir = "$conf/cni"
	[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
	runtime_type = "io.containerd.runc.v2"
	[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
	Root = "$run/runc"
	TOML
  cat >"$conf/cni/pods.conflist" <<-JSON
	{"cniVersion": "0.4.0", "name": "pods", "plugins": [
	  {"type": "ptp", "ipam": {"type": "host-local", "dataDir": "$state/cni",
	    "ranges": [[{"subnet": "$pod_cidr"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
	JSON
  # Images are never collected: the cluster could not pull them again.
  cat >"$conf/kubelet.yaml" <<-YAML
	apiVersion: kubelet.config.k8s.io/v1beta1
	kind: KubeletConfiguration
	authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $pki/ca.crt}}
	authorization: {mode: Webhook}
	tlsCertFile: $pki/kubelet-server.crt
	tlsPrivateKeyFile: $pki/kubelet-server.key
	containerRuntimeEndpoint: unix://$socket
	cgroupDriver: cgroupfs
	cgroupRoot: /$name
	failCgroupV1: false
	failSwapOn: false
	clusterDNS: [$node_ip]
	clusterDomain: cluster.local
	resolvConf: ""
	podLogsDir: $log/pods
	volumePluginDir: $state/kubelet/volume-plugins
	nodeStatusUpdateFrequency: 2s
	imageGCHighThresholdPercent: 100
	evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
	YAML
  cat >"$conf/kube-proxy.yaml" <<-YAML
	apiVersion: kubeproxy.config.k8s.io/v1alpha1
	kind: KubeProxyConfiguration
	clientConnection: {kubeconfig: $conf/kube-proxy.kubeconfig}
	mode: nftables
	clusterCIDR: $pod_cidr
	hostnameOverride: $node
	conntrack: {maxPerCore: 0, min: 0}
	YAML
  cat >"$conf/Corefile" <<-COREFILE
	.:53 {
	  bind $node_ip
	  errors
	  kubernetes cluster.local in-addr.arpa {
	    kubeconfig $conf/coredns.kubeconfig
	    ttl 1
	  }
	  template ANY ANY . {
	    rcode NXDOMAIN
	  }
	}
	COREFILE
  sysctl "${kernel[@]}" >"$conf/sysctl" 2>/dev/null || true
  touch "$conf/done"
}

network() {
  [ -e "/run/netns/$name" ] && return
  ip netns add "$name"
  ip link add "$name" type veth peer name eth0 netns "$name"
  ip addr add "$host_ip/30" dev "$name"
  ip link set "$name" up
  ip -n "$name" link set lo up
  ip -n "$name" addr add "$node_ip/30" dev eth0
  ip -n "$name" link set eth0 up
  inside sysctl -qw net.ipv4.ip_forward=1
  # The machine reaches pods and services by way of the node. The node's own route to services only lets kube-proxy see
  # the packets; it has no default route.
  ip route add "$pod_cidr" via "$node_ip"
  ip route add "$service_cidr" via "$node_ip"
  ip -n "$name" route add "$service_cidr" via "$host_ip"
}

# Hands the first packet of each connection to a pod to network-policies, but for the kubelet's, which probes. Its own
# rules do so too, on kernels with CONFIG_NFT_QUEUE.
policies() {
  local rule=(POSTROUTING -d "$pod_cidr" -m conntrack --ctstate NEW -m owner ! --uid-owner 0 -j NFQUEUE --queue-num 100 --queue-bypass)
  inside iptables -t mangle -C "${rule[@]}" 2>/dev/null || inside iptables -t mangle -A "${rule[@]}" 2>/dev/null ||
    { say "NetworkPolicies are not enforced: this kernel has no NFQUEUE"; return; }
  kubectl label --overwrite node "$node" weightsync.dev/network-policies=enforced >/dev/null
}

# inside COMMAND...: in the cluster's network namespace (not by `ip netns exec`, which hides the cgroups)
inside() { nsenter --net="/run/netns/$name" "$@"; }

cgroups() {
  local controller file
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p "$cgroup"
    for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
      for file in /sys/fs/cgroup "$cgroup"; do echo "+$controller" >"$file/cgroup.subtree_control" 2>/dev/null || true; done
    done
  else
    for controller in /sys/fs/cgroup/*/; do
      [ -e "$controller/tasks" ] || continue
      mkdir -p "$controller/$name"
      [ -e "$controller/cpuset.cpus" ] || continue
      for file in cpuset.cpus cpuset.mems; do cat "$controller/$file" >"$controller/$name/$file"; done
    done
  fi
  mkdir -p "$cgroup/servers"
}

# --- servers --------------------------------------------------------------------------------------------------------

identity() { echo "$1 $(cut -d' ' -f22 "/proc/$1/stat" 2>/dev/null)"; } # pid and start time
pid_of() { cut -d' ' -f1 "$run/$1.pid"; }
running() { [ -e "$run/$1.pid" ] && [ "$(cat "$run/$1.pid")" = "$(identity "$(pid_of "$1")")" ]; }
stopped() { ! running "$1"; }

# all_run: whether every server that was started still does
all_run() {
  local file server
  for file in "$run"/*.pid; do
    server=$(basename "$file" .pid)
    running "$server" || { say "$server ended"; return 1; }
  done
}

# last_words: of every server, at the end of a start that failed
last_words() {
  local file
  for file in "$log"/*.log; do
    [ ! -s "$file" ] || { say "the end of $file:" && tail -n 5 "$file" >&2; }
  done
}

# spawn NAME COMMAND...: in the background, unless it runs
spawn() {
  local server=$1
  shift
  running "$server" && return
  setsid bash -c 'echo $$ >"$0/cgroup.procs"; exec "$@"' "$cgroup/servers" \
    nsenter --net="/run/netns/$name" "$@" >>"$log/$server.log" 2>&1 </dev/null &
  identity $! >"$run/$server.pid"
}

start() {
  local etcd=http://127.0.0.1:2379
  case $1 in
  etcd)
    spawn etcd "$bin/etcd" --data-dir "$state/etcd" --unsafe-no-fsync --log-level warn \
      --listen-client-urls $etcd --advertise-client-urls $etcd --listen-peer-urls http://127.0.0.1:2380 ;;
  kube-apiserver)
    spawn kube-apiserver "$bin/kube-apiserver" --etcd-servers $etcd --advertise-address "$node_ip" --secure-port 6443 \
      --service-cluster-ip-range "$service_cidr" --authorization-mode Node,RBAC --allow-privileged \
      --enable-admission-plugins NodeRestriction --client-ca-file "$pki/ca.crt" \
      --tls-cert-file "$pki/apiserver.crt" --tls-private-key-file "$pki/apiserver.key" \
      --kubelet-certificate-authority "$pki/ca.crt" --kubelet-client-certificate "$pki/kubelet-client.crt" \
      --kubelet-client-key "$pki/kubelet-client.key" --kubelet-preferred-address-types InternalIP \
      --service-account-issuer https://kubernetes.default.svc.cluster.local \
      --service-account-key-file "$pki/sa.pub" --service-account-signing-key-file "$pki/sa.key" ;;
  kube-controller-manager)
    spawn kube-controller-manager "$bin/kube-controller-manager" --kubeconfig "$conf/controller-manager.kubeconfig" \
      --service-account-private-key-file "$pki/sa.key" --root-ca-file "$pki/ca.crt" --use-service-account-credentials \
      --leader-elect=false --secure-port 0 --flex-volume-plugin-dir "$state/volume-plugins" ;;
  kube-scheduler)
    spawn kube-scheduler "$bin/kube-scheduler" --kubeconfig "$conf/scheduler.kubeconfig" --leader-elect=false --secure-port 0 ;;
  containerd) spawn containerd containerd --config "$conf/containerd.toml" ;;
  kubelet)
    spawn kubelet "$bin/kubelet" --config "$conf/kubelet.yaml" --kubeconfig "$conf/kubelet.kubeconfig" \
      --root-dir "$state/kubelet" --cert-dir "$pki" --hostname-override "$node" --node-ip "$node_ip" ;;
  kube-proxy) spawn kube-proxy "$bin/kube-proxy" --config "$conf/kube-proxy.yaml" ;;
  coredns) spawn coredns "$bin/coredns" -conf "$conf/Corefile" ;;
  network-policies)
    spawn network-policies "$bin/network-policies" -kubeconfig "$conf/network-policies.kubeconfig" -node "$node" -queue 100 ;;
  device-plugin) spawn device-plugin "$bin/device-plugin" -count "$gpus" ;;
  *) say "no server is called $1: ${servers[*]}"; return 2 ;;
  esac
}

# The image of a pod's sandbox: one file, in an archive as `docker save` writes it.
pause_image() {
  local dir sum
  ctr images ls -q name==localhost/pause:1 | grep -q . && return
  dir=$(mktemp -d)
  cp "$bin/pause" "$dir/pause"
  tar -C "$dir" --owner 0 --group 0 -cf "$dir/layer.tar" pause
  sum=$(sha256sum "$dir/layer.tar" | cut -d' ' -f1)
  echo "{\"architecture\": \"$(go_arch)\", \"os\": \"linux\", \"config\": {\"User\": \"65535:65535\", \"Entrypoint\": [\"/pause\"]}," \
    "\"rootfs\": {\"type\": \"layers\", \"diff_ids\": [\"sha256:$sum\"]}}" >"$dir/config.json"
  echo '[{"Config": "config.json", "RepoTags": ["localhost/pause:1"], "Layers": ["layer.tar"]}]' >"$dir/manifest.json"
  tar -C "$dir" -cf "$dir/pause.tar" manifest.json config.json layer.tar
  ctr images import "$dir/pause.tar" >/dev/null
  rm -rf "$dir"
}

go_arch() { case $(uname -m) in x86_64) echo amd64 ;; aarch64) echo arm64 ;; *) uname -m ;; esac; }

gpus_ready() { [ "$(kubectl get node "$node" -o 'jsonpath={.status.allocatable.nvidia\.com/gpu}')" = "$gpus" ]; }

# --- commands -------------------------------------------------------------------------------------------------------

up() {
  local server started reason
  reason=$(why_not)
  [ -z "$reason" ] || { say "$reason"; return 2; }
  packages
  bin=$("$here/build.sh")
  started=$SECONDS
  configure
  watched=yes
  trap '[ $? = 0 ] || last_words' EXIT
  network
  cgroups
  for server in etcd kube-apiserver containerd; do start "$server"; done
  until_true 300 ctr version
  pause_image
  until_true 300 kubectl get --raw /readyz
  kubectl get clusterrolebinding node >/dev/null 2>&1 ||
    kubectl create clusterrolebinding node --clusterrole view --user coredns --user network-policies >/dev/null
  for server in "${servers[@]}"; do start "$server"; done
  until_true 300 kubectl wait --for condition=Ready "node/$node" --timeout 5s
  until_true 300 kubectl get serviceaccount default
  until_true 300 gpus_ready
  policies
  all_run
  say "ready after $((SECONDS - started)) s: export KUBECONFIG=$kubeconfig"
}

status() {
  local server
  for server in "${servers[@]}"; do
    if running "$server"; then
      echo "$server: pid $(pid_of "$server"), $(awk '/VmRSS/ {print int($2 / 1024)}' "/proc/$(pid_of "$server")/status") MiB"
    else
      echo "$server: not running"
    fi
  done
  kubectl get nodes,pods --all-namespaces -o wide
}

restart() {
  running "$1" && kill -9 "$(pid_of "$1")"
  until_true 10 stopped "$1"
  start "$1"
}

# Pods are ended through containerd, which then forgets them and keeps the images; then every process of the cgroup:
# the servers, their children, and what is left of pods.
down() {
  local signal pids mount i
  [ -e "$conf" ] || { say "no cluster in $state"; return 0; }
  running kubelet && kill "$(pid_of kubelet)" && until_true 10 stopped kubelet
  if running containerd; then
    ctr tasks ls -q | xargs -r -P 4 -n 1 timeout 20 ctr --address "$socket" --namespace k8s.io tasks rm -f >/dev/null 2>&1 || true
    ctr containers ls -q | xargs -r timeout 60 ctr --address "$socket" --namespace k8s.io containers rm >/dev/null 2>&1 || true
  fi
  for signal in TERM KILL KILL KILL; do
    for i in $(seq 20); do
      pids=$(find "$cgroup" -name cgroup.procs -exec cat {} + 2>/dev/null || true)
      [ -z "$pids" ] && break 2
      # shellcheck disable=SC2086
      [ "$i" = 1 ] && { kill "-$signal" $pids 2>/dev/null || true; }
      sleep 0.2
    done
  done
  for i in 1 2; do # mounts can be stacked
    for mount in $(awk -v dir="$state/" 'index($5, dir) == 1 {print $5}' /proc/self/mountinfo | sort -r); do
      umount "$mount" 2>/dev/null || umount -l "$mount" 2>/dev/null || true
    done
  done
  ip netns del "$name" 2>/dev/null || true
  ip link del "$name" 2>/dev/null || true # and so its routes
  find /sys/fs/cgroup/"$name" /sys/fs/cgroup/*/"$name" -depth -type d -exec rmdir {} + 2>/dev/null || true
  # Paths that the kubelet, libcni and containerd's shims have fixed.
  find /var/log/containers -lname "$log/*" -delete 2>/dev/null || true
  { grep -ls "$state/" /var/lib/cni/results/* || true; } | xargs -r rm -f
  rm -rf /var/lib/kubelet/device-plugins
  [ "$(ls -A /etc/cni/net.d 2>/dev/null)" != cni.lock ] || rm -rf /etc/cni
  find /run/containerd -type d -empty -delete 2>/dev/null || true
  rmdir /var/log/containers /var/lib/cni/results /var/lib/cni /var/lib/kubelet 2>/dev/null || true
  [ ! -e "$conf/sysctl" ] || sysctl -qp "$conf/sysctl" || true
  rm -rf --one-file-system "$state"
}

bin=$("$here/build.sh" --where)
case ${1:-} in
up) up ;;
down) down ;;
status) status ;;
images) "$here/images.sh" build && CONTAINERD_ADDRESS=$socket "$here/images.sh" load ;;
load) ctr images import "$2" ;;
restart) restart "$2" ;;
kubectl) shift && kubectl "$@" ;;
why-not) why_not ;;
kubeconfig) echo "$kubeconfig" ;;
*) sed -n '2,/^set/{/^#/p}' "$0" | cut -c3- && exit 2 ;;
esac
