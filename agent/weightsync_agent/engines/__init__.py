"""Real trainers and engines: each module is the whole of what one of them needs, and imports it only when it is used."""
