"""How the collectives work: primitives, trees of arrays, mesh axes. Not public; see ``jaxhetero._collectives.api``."""
