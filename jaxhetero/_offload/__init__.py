"""How ``jaxhetero.offload`` replaces the collectives of a traced program."""
