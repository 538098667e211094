//! The input and output of `divvy audit`: reads the input files for [`divvy_audit`], and formats its results as text and JSON.
//!
//! # Reports of containers
//!
//! `--reports FILE` has JSON lines in chronological order: one line when a container is first seen running, and one when it is
//! seen to have ended. Further lines about the same container are ignored:
//!
//! ```json
//! {"at":1767323046.5,"node":"n1","pod_uid":"0e1…","container":"main","id":"4f2…","running":true,"gpus":[0],"env":{"ALIYUN_COM_GPU_MEM_IDX":"0","NVIDIA_VISIBLE_DEVICES":"void"}}
//! {"at":1767323059.0,"node":"n1","pod_uid":"0e1…","container":"main","id":"4f2…","running":false}
//! ```
//!
//! `at` is Unix time in seconds, from a clock that agrees with the recorder's clock to a few milliseconds. `gpus` are the minor
//! numbers of `/dev/nvidia<minor>` in the container, or UUIDs. If `gpus` is absent, the audit takes the GPUs from the
//! environment variables. `env` is the environment of the container's process, of which the audit reads
//! `NVIDIA_VISIBLE_DEVICES` and `ALIYUN_COM_GPU_MEM_*`. `id` is unique to the container.

pub mod history;
pub mod read;
pub mod text;
