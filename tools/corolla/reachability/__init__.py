"""Whether other servers can reach this one: they are asked to dial its address."""
