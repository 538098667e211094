//! Symbols for graphs.

use std::ffi::{c_char, c_int};
use std::mem::offset_of;

use super::pointer::{In, InOut, Out, Untyped};
use super::pool;
use super::symbols::symbols;
use crate::codes::{CuCode, INVALID_VALUE};
use crate::driver::SimulatedDriver;
use crate::vmm::MemoryPlace;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct GraphAllocation {
    pool: pool::PoolProperties,
    accesses: usize,
    count: u64,
    bytes: u64,
    address: u64,
}

/// `CUgraphNodeParams`: the type, and in the numbers the parameters of that type.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct GraphNodeParams {
    kind: c_int,
    reserved: [c_int; 3],
    words: [u64; 29],
    last: u64,
}

/// CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEM_ALLOC, and CU_GRAPH_NODE_TYPE_MEM_FREE.
const KERNEL: c_int = 0;
const ALLOCATE: c_int = 10;
const FREE: c_int = 11;
/// Where `bytes` and `address` are in [`GraphAllocation`], and so in the words of [`GraphNodeParams`].
const BYTES: usize = offset_of!(GraphAllocation, bytes) / 8;
const ADDRESS: usize = offset_of!(GraphAllocation, address) / 8;
const LOCATION: usize = offset_of!(pool::PoolProperties, location) / 8;

// The layout in cuda.h.
const _: () = assert!(size_of::<GraphAllocation>() == 120 && BYTES * 8 == 104 && ADDRESS * 8 == 112);
const _: () = assert!(size_of::<GraphNodeParams>() == 256 && offset_of!(GraphNodeParams, words) == 16);

symbols! {
    call cuGraphCreate(graph: Out<usize>, flags: u32) |driver| {
        graph.present()?;
        match flags {
            0 => graph.put(driver.create_graph()),
            _ => Err(INVALID_VALUE),
        }
    };

    call cuGraphDestroy(graph: usize) |driver| driver.destroy_graph(graph);

    call cuGraphAddEmptyNode(node: Out<usize>, graph: usize, _from: usize, _count: u64) |driver| {
        node.present()?;
        node.put(driver.add_other(graph)?)
    };

    // The parameters begin with the function in each version.
    call [cuGraphAddKernelNode, cuGraphAddKernelNode_v2](node: Out<usize>, graph: usize, _from: usize, _count: u64, function: In<usize>) |driver| {
        node.present()?;
        let length = driver.node(function.get()?)?;
        node.put(driver.add_kernel(graph, length)?)
    };

    call cuGraphAddMemAllocNode(node: Out<usize>, graph: usize, _from: usize, _count: u64, parameters: InOut<GraphAllocation>) |driver| {
        node.present()?;
        let mut of = parameters.get()?;
        let (added, address) = allocate(driver, graph, of.pool.location.kind, of.pool.location.id, of.bytes)?;
        of.address = address;
        parameters.put(of)?;
        node.put(added)
    };

    call cuGraphAddMemFreeNode(node: Out<usize>, graph: usize, _from: usize, _count: u64, address: u64) |driver| {
        node.present()?;
        node.put(driver.add_free(graph, address)?)
    };

    call cuGraphAddNode(node: Out<usize>, graph: usize, _from: usize, _count: u64, parameters: InOut<GraphNodeParams>) |driver| {
        node.present()?;
        node.put(add(driver, graph, parameters)?)
    };

    call cuGraphAddNode_v3(node: Out<usize>, graph: usize, _from: usize, _edges: usize, _count: u64, parameters: InOut<GraphNodeParams>) |driver| {
        node.present()?;
        node.put(add(driver, graph, parameters)?)
    };

    call cuGraphAddNode_v2(node: Out<usize>, graph: usize, _from: usize, _edges: usize, _count: u64, parameters: InOut<GraphNodeParams>) |driver| {
        node.present()?;
        node.put(add(driver, graph, parameters)?)
    };

    call [cuGraphInstantiate, cuGraphInstantiate_v2](executable: Out<usize>, graph: usize, _node: usize, _log: Out<c_char>, _length: u64) |driver| {
        executable.present()?;
        executable.put(driver.instantiate(graph, 0)?)
    };

    call cuGraphInstantiateWithFlags(executable: Out<usize>, graph: usize, flags: u64) |driver| {
        executable.present()?;
        executable.put(driver.instantiate(graph, flags)?)
    };

    // The parameters begin with the flags.
    call [cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz](executable: Out<usize>, graph: usize, flags: In<u64>) |driver| {
        executable.present()?;
        executable.put(driver.instantiate(graph, flags.get()?)?)
    };

    call [cuGraphUpload, cuGraphUpload_ptsz](executable: usize, stream: usize) |driver| {
        driver.stream(stream)?;
        driver.upload_graph(executable)
    };

    call [cuGraphLaunch, cuGraphLaunch_ptsz](executable: usize, stream: usize) |driver| driver.launch_graph(executable, stream);

    call cuGraphExecDestroy(executable: usize) |driver| driver.destroy_executable(executable);

    call cuDeviceGraphMemTrim(device: c_int) |driver| {
        let device = driver.device(device)?;
        driver.trim_graphs(device)
    };

    call cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: Untyped) |driver| {
        let device = driver.device(device)?;
        let graphs = driver.devices[device].graphs;
        value.write::<u64>(match attribute {
            0 => graphs.used,
            1 => graphs.used_high,
            2 => graphs.reserved,
            3 => graphs.reserved_high,
            _ => return Err(INVALID_VALUE),
        })
    };

    // The high marks can only be reset to zero.
    call cuDeviceSetGraphMemAttribute(device: c_int, attribute: c_int, value: Untyped) |driver| {
        let device = driver.device(device)?;
        let graphs = &mut driver.devices[device].graphs;
        match (attribute, value.read::<u64>()?) {
            (1, 0) => graphs.used_high = graphs.used,
            (3, 0) => graphs.reserved_high = graphs.reserved,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    };

    call [cuStreamBeginCapture, cuStreamBeginCapture_ptsz](stream: usize) |driver| capture(driver, stream);

    call [cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz](stream: usize, _mode: c_int) |driver| capture(driver, stream);

    call [cuStreamEndCapture, cuStreamEndCapture_ptsz](stream: usize, graph: Out<usize>) |driver| {
        graph.present()?;
        // CUDA_ERROR_ILLEGAL_STATE
        graph.put(driver.stream(stream)?.capture.take().ok_or(401)?)
    };

    call [cuStreamIsCapturing, cuStreamIsCapturing_ptsz](stream: usize, status: Out<c_int>) |driver| {
        let captured = driver.stream(stream)?.capture.is_some();
        status.put(c_int::from(captured))
    };
}

fn capture(driver: &mut SimulatedDriver, stream: usize) -> Result<(), CuCode> {
    // The legacy default stream cannot be captured: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
    if stream < 2 {
        return Err(900);
    }
    if driver.stream(stream)?.capture.is_some() {
        return Err(401);
    }
    let graph = driver.create_graph();
    driver.stream(stream)?.capture = Some(graph);
    Ok(())
}

fn allocate(driver: &mut SimulatedDriver, graph: usize, kind: c_int, id: c_int, bytes: u64) -> Result<(usize, u64), CuCode> {
    match driver.place_of(kind, id)? {
        MemoryPlace::Device(device) => driver.add_allocation(graph, device, bytes),
        MemoryPlace::Host => Err(INVALID_VALUE),
    }
}

/// Add a node of any type.
fn add(driver: &mut SimulatedDriver, graph: usize, parameters: InOut<GraphNodeParams>) -> Result<usize, CuCode> {
    let mut node = parameters.get()?;
    match node.kind {
        KERNEL => {
            let length = driver.node(node.words[0] as usize)?;
            driver.add_kernel(graph, length)
        }
        ALLOCATE => {
            let location = node.words[LOCATION].to_le_bytes();
            let [a, b, c, d, e, f, g, h] = location;
            let (kind, id) = (c_int::from_le_bytes([a, b, c, d]), c_int::from_le_bytes([e, f, g, h]));
            let (added, address) = allocate(driver, graph, kind, id, node.words[BYTES])?;
            node.words[ADDRESS] = address;
            parameters.put(node)?;
            Ok(added)
        }
        FREE => driver.add_free(graph, node.words[0]),
        _ => driver.add_other(graph),
    }
}
