//! The table of all checks, in the order of the chain from the driver to the pods.
//!
//! The letter of an id names the area: D hardware and driver, C CDI specs, R operating system and container engine, K Kubernetes and
//! GPU sharing. `docs/doctor.md` lists the checks.

mod amd;
mod cdi;
mod cluster;
mod docker;
mod driver;
mod engine;
mod intel;
mod kubelet;
mod libraries;
mod nodes;
mod nvidia;
mod objects;
mod pods;
mod scheduler;
mod system;
mod vendor_part;
mod vendors;

use crate::check::{Check, CheckGroup, Needs, Severity};

/// Build one row of the table.
const fn check(
    id: &'static str,
    group: CheckGroup,
    severity: Severity,
    needs: Needs,
    title: &'static str,
    run: fn(&crate::Facts<'_>) -> crate::CheckVerdict,
) -> Check {
    Check {
        id,
        title,
        group,
        severity,
        needs,
        run,
    }
}

use CheckGroup::{Cdi, Cluster, Driver, Engine, Kubelet, Libraries, Nodes, Pods};
use Needs::{Either, Node};
use Severity::{Error, Info, Warning};

/// All checks, in the order in which they run and are printed.
pub const ALL: &[Check] = &[
    check("D01", Driver, Error, Node, "a GPU is on the PCI bus", driver::on_the_bus),
    check("D02", Driver, Error, Node, "the kernel driver is loaded", driver::loaded),
    check(
        "D06",
        Driver,
        Error,
        Node,
        "nouveau does not drive an NVIDIA GPU",
        nvidia::nouveau,
    ),
    check(
        "D03",
        Driver,
        Error,
        Node,
        "the driver is new enough for device plugins (384.81)",
        nvidia::for_plugins,
    ),
    check(
        "D04",
        Driver,
        Error,
        Node,
        "the driver is new enough for containers (418.81.07)",
        nvidia::for_containers,
    ),
    check("D11", Driver, Error, Node, "every GPU answers", nvidia::answers),
    check(
        "D08",
        Driver,
        Error,
        Node,
        "every GPU has compute capability 3.0 or higher",
        nvidia::capability,
    ),
    check(
        "D12",
        Driver,
        Warning,
        Node,
        "the compute mode lets processes share a GPU",
        nvidia::compute_mode,
    ),
    check(
        "D13",
        Driver,
        Info,
        Node,
        "the driver stays initialized (persistence)",
        nvidia::persistence,
    ),
    check(
        "D14",
        Driver,
        Warning,
        Node,
        "no change of the MIG mode is pending",
        nvidia::mig,
    ),
    check("D15", Driver, Error, Node, "AMD's compute driver is loaded", amd::compute),
    check(
        "D16",
        Driver,
        Error,
        Node,
        "all AMD GPUs are partitioned the same way",
        amd::partitions,
    ),
    check(
        "D17",
        Driver,
        Error,
        Node,
        "Intel GPUs have a driver and render nodes",
        intel::nodes,
    ),
    check(
        "D09",
        Nodes,
        Error,
        Node,
        "device nodes exist and have the driver's device numbers",
        nodes::exists,
    ),
    check(
        "D10",
        Nodes,
        Warning,
        Node,
        "/dev/char has links to the device nodes",
        nvidia::char_links,
    ),
    check("D07", Libraries, Error, Node, "NVML can be loaded", libraries::nvml),
    check(
        "D05",
        Libraries,
        Error,
        Node,
        "the driver libraries and the kernel module have the same version",
        libraries::same_version,
    ),
    check("C01", Cdi, Error, Node, "CDI specs match the loaded driver", cdi::fresh),
    check(
        "C02",
        Cdi,
        Error,
        Node,
        "container engines accept every CDI spec",
        cdi::usable,
    ),
    check("R01", Engine, Error, Node, "GPU drivers exist for this kernel", system::linux),
    check(
        "R02",
        Engine,
        Warning,
        Node,
        "overlay and br_netfilter are loaded now and at every boot",
        system::modules,
    ),
    check(
        "R03",
        Engine,
        Error,
        Node,
        "a CDI spec or a runtime puts the driver into containers",
        system::installed,
    ),
    check(
        "R04",
        Engine,
        Warning,
        Node,
        "the NVIDIA toolkit supports this machine's cgroup version",
        system::cgroup_v2,
    ),
    check("R05", Engine, Info, Node, "the engine that runs pods is known", engine::which),
    check("R06", Engine, Error, Node, "Docker is new enough", docker::version),
    check(
        "R07",
        Engine,
        Error,
        Node,
        "Docker has a runtime for GPUs or uses CDI",
        docker::runtime,
    ),
    check(
        "R08",
        Engine,
        Error,
        Node,
        "the sections of containerd's configuration match its version",
        engine::version,
    ),
    check(
        "R12",
        Engine,
        Error,
        Node,
        "containerd's CRI plugin is enabled",
        engine::enabled,
    ),
    check("R11", Engine, Error, Node, "the default runtime is defined", engine::default),
    check(
        "R09",
        Engine,
        Error,
        Node,
        "the program of the runtime handler for GPUs exists",
        engine::handler,
    ),
    check(
        "R10",
        Engine,
        Error,
        Node,
        "pods get the driver by default, by CDI, or by a RuntimeClass",
        engine::reached,
    ),
    check(
        "R13",
        Engine,
        Error,
        Node,
        "the kubelet and the runtimes use the same cgroup driver",
        engine::cgroups,
    ),
    check(
        "R14",
        Engine,
        Error,
        Either,
        "every RuntimeClass for GPUs names a handler that exists",
        engine::runtime_class,
    ),
    check("R15", Engine, Info, Node, "the engine is set up for CDI", engine::cdi),
    check(
        "R16",
        Engine,
        Warning,
        Node,
        "the engine was restarted after its last configuration change",
        engine::restarted,
    ),
    check(
        "K18",
        Engine,
        Error,
        Node,
        "divvy-runtime gives a container the GPUs that it requests",
        kubelet::test_container,
    ),
    check(
        "K02",
        Kubelet,
        Error,
        Node,
        "the kubelet accepts device plugins",
        kubelet::socket,
    ),
    check(
        "K03",
        Kubelet,
        Error,
        Either,
        "a device plugin is running and offers GPUs",
        kubelet::plugin,
    ),
    check(
        "K06",
        Kubelet,
        Error,
        Either,
        "the plugin's list of device ids fits into one kubelet message",
        kubelet::message,
    ),
    check(
        "K17",
        Kubelet,
        Info,
        Node,
        "exporters can query which pod has which GPU",
        kubelet::pod_resources,
    ),
    check(
        "K01",
        Cluster,
        Warning,
        Needs::Cluster,
        "kubelets are new enough",
        cluster::versions,
    ),
    check(
        "K04",
        Cluster,
        Error,
        Either,
        "only one device plugin offers the GPUs of a node",
        cluster::one_plugin,
    ),
    check(
        "K05",
        Cluster,
        Warning,
        Needs::Cluster,
        "no node lists a resource whose device plugin is gone",
        cluster::leftovers,
    ),
    check(
        "K19",
        Cluster,
        Warning,
        Needs::Cluster,
        "containers get the driver libraries",
        cluster::libraries,
    ),
    check(
        "K07",
        Cluster,
        Error,
        Needs::Cluster,
        "device plugin DaemonSets select the GPU nodes",
        cluster::labels,
    ),
    check(
        "K08",
        Cluster,
        Error,
        Needs::Cluster,
        "a node matches the extender's nodeSelector",
        cluster::extender_node,
    ),
    check(
        "K09",
        Cluster,
        Error,
        Needs::Cluster,
        "device plugins and waiting pods tolerate the taints of GPU nodes",
        cluster::taints,
    ),
    check(
        "K10",
        Cluster,
        Error,
        Node,
        "kube-scheduler supports the version of its configuration",
        scheduler::version,
    ),
    check(
        "K11",
        Cluster,
        Error,
        Node,
        "kube-scheduler's configuration file exists and is mounted",
        scheduler::mounted,
    ),
    check(
        "K12",
        Cluster,
        Error,
        Either,
        "the extender answers, and kube-scheduler calls it",
        scheduler::extender,
    ),
    check(
        "K13",
        Pods,
        Warning,
        Needs::Cluster,
        "pods request GPUs in a way that has an effect",
        pods::requests,
    ),
    check(
        "K14",
        Pods,
        Warning,
        Needs::Cluster,
        "pods do not set NVIDIA_VISIBLE_DEVICES",
        pods::visible_devices,
    ),
    check(
        "K15",
        Pods,
        Warning,
        Needs::Cluster,
        "pods with images for GPUs request a GPU",
        pods::silent,
    ),
    check(
        "K16",
        Pods,
        Warning,
        Needs::Cluster,
        "no pod failed admission on its node",
        pods::admission,
    ),
];

/// Return the check with this id, ignoring case, or `None` if there is no such check.
pub fn by_id(id: &str) -> Option<&'static Check> {
    ALL.iter().find(|check| check.id.eq_ignore_ascii_case(id))
}
