"""Questions about programs that several passes ask: effects, access tables, divergence, liveness."""
