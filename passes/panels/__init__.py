"""Cuts products into panels, so that one panel is multiplied while the next is on its way and only few are alive."""
