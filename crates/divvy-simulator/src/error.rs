/// Why something that was to be read cannot be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It looks compressed and is not, or not to the end.
    #[error("{what} cannot be decompressed ({why}); is the file whole? `gzip -t FILE` says so")]
    Gzip {
        /// What was to be read.
        what: String,
        /// What gzip says.
        why: String,
    },
    /// It is not a table with the columns that are needed.
    #[error("{what}: {why}; expected are the columns of openb's {example}")]
    Table {
        /// What was to be read.
        what: String,
        /// What is wrong, and in which line.
        why: String,
        /// The columns.
        example: &'static str,
    },
    /// A number is out of all bounds.
    #[error("{what}, {whose}: {why}")]
    Value {
        /// What was to be read.
        what: String,
        /// The node or pod.
        whose: String,
        /// What was found, what is allowed.
        why: String,
    },
    /// It is not an order of arrival for this trace.
    #[error(
        "{what}: {why}; expected are two lines of numbers: the rows of the pod list (from 0) as they arrive, and the rank of each row of the node list"
    )]
    Order {
        /// What was to be read.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// Times are asked of a list that has none.
    #[error(
        "pod {pod} has no times; with --lifetimes trace every row of the pod list needs creation_time and deletion_time, in seconds (openb's lists have \
         them), and --lifetimes exp needs none"
    )]
    NoTime {
        /// The first of those pods.
        pod: String,
    },
    /// A load is asked of pods that cannot make one.
    #[error(
        "no pod of the list asks for a GPU for any time, so they cannot load the GPUs; expected are rows with num_gpu and gpu_milli above 0"
    )]
    NoGpu,
    /// There is nothing to place on.
    #[error("no node of the list has a GPU; expected are rows with gpu above 0")]
    NoGpuNode,
    /// A cluster in which nothing is shared.
    #[error(
        "no node of the cluster offers aliyun.com/gpu-mem, so there is nothing to place; does the Divvy agent (or gpushare's plugin) run on the GPU nodes? \
         `kubectl get nodes -o custom-columns=NAME:.metadata.name,GPU:.status.capacity.aliyun\\.com/gpu-mem` shows it"
    )]
    NoGpuMemory,
    /// More nodes are to be like one that is not there.
    #[error("there is no node {name} that more could be like; nodes with GPUs are {names}")]
    NoSuchNode {
        /// The name that was given.
        name: String,
        /// Some that there are.
        names: String,
    },
}
