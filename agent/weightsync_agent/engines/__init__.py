"""Real trainers and engines: each module is all that one of them needs, and imports it only when it is used."""
