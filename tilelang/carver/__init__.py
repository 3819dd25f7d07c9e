"""Facts about architectures that programs ask for when they choose tile sizes."""
