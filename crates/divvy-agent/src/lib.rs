//! The node agent: device plugin, arbiter of GPU memory, publisher of the inventory
