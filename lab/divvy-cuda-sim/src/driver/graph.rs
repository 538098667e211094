//! Graphs of the driver, as far as they concern memory.

use super::SimulatedDriver;
use crate::codes::{CuCode, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY};
use crate::graph::{Executable, GraphMemory, GraphNode};
use crate::memory::{AllocationKind, MemoryAllocation};
use crate::slab::{PAGE, pages};

impl SimulatedDriver {
    pub(crate) fn create_graph(&mut self) -> usize {
        let handle = self.new_handle();
        self.graphs.graphs.insert(handle, Vec::new());
        handle
    }

    pub(crate) fn destroy_graph(&mut self, graph: usize) -> Result<(), CuCode> {
        self.graphs.graphs.remove(&graph).map(drop).ok_or(INVALID_HANDLE)
    }

    fn add(&mut self, graph: usize, node: GraphNode) -> Result<usize, CuCode> {
        self.graphs.graphs.get_mut(&graph).ok_or(INVALID_HANDLE)?.push(node);
        Ok(self.new_handle())
    }

    /// Add a node that allocates. Return the node and the address, which is the same at each launch.
    pub(crate) fn add_allocation(&mut self, graph: usize, device: usize, bytes: u64) -> Result<(usize, u64), CuCode> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let bytes = pages(bytes).ok_or(OUT_OF_MEMORY)?;
        let address = self.memory.addresses(bytes, PAGE)?;
        self.graphs.addresses.insert(address);
        Ok((self.add(graph, GraphNode::Allocate { device, address, bytes })?, address))
    }

    /// Add a node that frees what a node of any graph has allocated, once in each graph (cuda.h, cuGraphAddMemFreeNode).
    pub(crate) fn add_free(&mut self, graph: usize, address: u64) -> Result<usize, CuCode> {
        let nodes = self.graphs.graphs.get(&graph).ok_or(INVALID_HANDLE)?;
        let freed = nodes
            .iter()
            .any(|node| matches!(node, GraphNode::Free { address: other } if *other == address));
        if freed || !self.graphs.addresses.contains(&address) {
            return Err(INVALID_VALUE);
        }
        self.add(graph, GraphNode::Free { address })
    }

    pub(crate) fn add_kernel(&mut self, graph: usize, length: u64) -> Result<usize, CuCode> {
        self.add(graph, GraphNode::Kernel { length })
    }

    pub(crate) fn add_other(&mut self, graph: usize) -> Result<usize, CuCode> {
        self.add(graph, GraphNode::Other)
    }

    /// Make a graph that can be launched.
    pub(crate) fn instantiate(&mut self, graph: usize, flags: u64) -> Result<usize, CuCode> {
        let nodes = self.graphs.graphs.get(&graph).ok_or(INVALID_HANDLE)?.clone();
        let handle = self.new_handle();
        self.graphs.executables.insert(
            handle,
            Executable {
                nodes,
                frees: flags & 1 != 0,
            },
        );
        Ok(handle)
    }

    pub(crate) fn destroy_executable(&mut self, handle: usize) -> Result<(), CuCode> {
        self.graphs.executables.remove(&handle).map(drop).ok_or(INVALID_HANDLE)
    }

    /// Reserve what a launch of a graph will allocate.
    pub(crate) fn upload_graph(&mut self, handle: usize) -> Result<(), CuCode> {
        let Executable { nodes, .. } = self.graphs.executables.get(&handle).ok_or(INVALID_HANDLE)?.clone();
        for node in nodes {
            let GraphNode::Allocate { device, bytes, .. } = node else {
                continue;
            };
            let GraphMemory { used, reserved, .. } = self.devices[device].graphs;
            let missing = (used + bytes).saturating_sub(reserved);
            self.take(device, missing)?;
            self.devices[device].graphs.reserved += missing;
        }
        Ok(())
    }

    /// Launch a graph in a stream.
    pub(crate) fn launch_graph(&mut self, handle: usize, stream: usize) -> Result<(), CuCode> {
        let Executable { nodes, frees } = self.graphs.executables.get(&handle).ok_or(INVALID_HANDLE)?.clone();
        self.stream(stream)?;
        for node in &nodes {
            let GraphNode::Allocate { address, .. } = node else { continue };
            match (self.memory.allocations.contains_key(address), frees) {
                (true, true) => self.release(*address)?,
                // "If any allocations created by hGraphExec remain unfreed (from a previous launch) […] the launch will fail with
                // CUDA_ERROR_INVALID_VALUE" (cuda.h, cuGraphLaunch).
                (true, false) => return Err(INVALID_VALUE),
                (false, _) => {}
            }
        }
        for node in nodes {
            match node {
                GraphNode::Allocate { device, address, bytes } => self.allocate_for_graph(device, address, bytes)?,
                GraphNode::Free { address } => self.release(address)?,
                GraphNode::Kernel { length } => self.run(stream, length)?,
                GraphNode::Other => {}
            }
        }
        Ok(())
    }

    fn allocate_for_graph(&mut self, device: usize, address: u64, bytes: u64) -> Result<(), CuCode> {
        let GraphMemory { used, reserved, .. } = self.devices[device].graphs;
        let used = used.checked_add(bytes).ok_or(OUT_OF_MEMORY)?;
        if used > reserved {
            self.take(device, used - reserved)?;
        }
        let graphs = &mut self.devices[device].graphs;
        graphs.used = used;
        graphs.used_high = graphs.used_high.max(used);
        graphs.reserved = graphs.reserved.max(used);
        graphs.reserved_high = graphs.reserved_high.max(graphs.reserved);
        let allocation = MemoryAllocation::new(device, None, bytes, AllocationKind::Graph);
        self.memory.allocations.insert(address, allocation);
        Ok(())
    }

    /// Give back the memory of a device's graphs that no allocation uses.
    pub(crate) fn trim_graphs(&mut self, device: usize) -> Result<(), CuCode> {
        let graphs = &mut self.devices[device].graphs;
        let given = graphs.reserved - graphs.used;
        graphs.reserved = graphs.used;
        self.devices[device].give(given)
    }
}
