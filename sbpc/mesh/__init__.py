"""States, layouts, meshes and clusters: what a tensor's placement is and what a mesh of devices can do."""
