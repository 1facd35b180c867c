"""The serving side: HTTP surface, controller, scheduler and cache accounting. No device calls."""
