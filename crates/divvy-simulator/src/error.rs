/// Why an input cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The data looks compressed, but it is not compressed, or it is cut off.
    #[error("{what} cannot be decompressed ({why}); check the file with `gzip -t FILE`")]
    Gzip {
        /// What was being read.
        what: String,
        /// What gzip reports.
        why: String,
    },
    /// The data is not a table with the required columns.
    #[error("{what}: {why}; it needs the columns of openb's {example}")]
    Table {
        /// What was being read.
        what: String,
        /// What is wrong, and on which line.
        why: String,
        /// The required columns.
        example: &'static str,
    },
    /// A number is out of range.
    #[error("{what}, {whose}: {why}")]
    Value {
        /// What was being read.
        what: String,
        /// The node or pod.
        whose: String,
        /// What was found, and what is allowed.
        why: String,
    },
    /// The data does not describe an order of arrivals for this trace.
    #[error(
        "{what}: {why}; it needs two lines of numbers: the rows of the pod list (from 0) as they arrive, and the rank of each row of the node list"
    )]
    Order {
        /// What was being read.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// Lifetimes are needed, but the list has no times.
    #[error(
        "pod {pod} has no times; with --lifetimes trace, every row of the pod list needs creation_time and deletion_time in seconds, as in \
         openb's lists; without such columns, use --lifetimes exp"
    )]
    NoTime {
        /// The first pod without times.
        pod: String,
    },
    /// A load is needed, but no pod requests a GPU for longer than 0 seconds.
    #[error(
        "no pod of the list asks for a GPU for any time, so they put no load on the GPUs; the list needs rows with num_gpu and gpu_milli above 0"
    )]
    NoGpu,
    /// No node has a GPU.
    #[error("no node of the list has a GPU; the list needs rows with gpu above 0")]
    NoGpuNode,
    /// No node of the cluster offers shared GPU memory.
    #[error(
        "no node of the cluster offers aliyun.com/gpu-mem, so there is nothing to place; check that the Divvy agent (or gpushare's plugin) runs on \
         the GPU nodes: `kubectl get nodes -o custom-columns=NAME:.metadata.name,GPU:.status.capacity.aliyun\\.com/gpu-mem`"
    )]
    NoGpuMemory,
    /// The node to be copied does not exist.
    #[error("there is no node {name} to copy; nodes with GPUs are {names}")]
    NoSuchNode {
        /// The given name.
        name: String,
        /// The names of some existing nodes with GPUs.
        names: String,
    },
}
