"""Testing graph rewrites: random decoders, random routings, and what must be equal. Needs `hypothesis`."""
