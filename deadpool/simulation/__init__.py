"""Real cores in a modelled world: searched whole when small, sampled by seed when not."""
