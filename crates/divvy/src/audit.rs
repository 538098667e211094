//! `divvy audit`: the words and the files around [`divvy_placement::audit`].
//!
//! # What containers say of themselves
//!
//! `--reports FILE` is JSON lines in the order of time, one when a container is first seen to run and one when it is seen to have ended
//! (more of either are ignored):
//!
//! ```json
//! {"at":1767323046.5,"node":"n1","pod_uid":"0e1…","container":"main","id":"4f2…","running":true,"gpus":[0],"env":{"ALIYUN_COM_GPU_MEM_IDX":"0","NVIDIA_VISIBLE_DEVICES":"void"}}
//! {"at":1767323059.0,"node":"n1","pod_uid":"0e1…","container":"main","id":"4f2…","running":false}
//! ```
//!
//! `at` is Unix time in seconds, by a clock that agrees with the recorder's to some milliseconds. `gpus` are the minor numbers of
//! `/dev/nvidia<minor>` in the container, or UUIDs; absent: nobody looked, and then the variables alone decide. `env` is the process's own
//! environment; `NVIDIA_VISIBLE_DEVICES` and `ALIYUN_COM_GPU_MEM_*` are looked at. `id` is anything that no other container has.

pub mod history;
pub mod read;
pub mod text;
