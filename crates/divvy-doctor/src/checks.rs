//! All checks, in the order of the chain from the driver to the pods.
//!
//! Ids and what each looks for: research/vendors-ux.md section 6 (D: hardware and driver, R: operating system and container engine,
//! K: Kubernetes and sharing); C are checks of CDI specs that are not among those.

mod cdi;
mod cluster;
mod docker;
mod driver;
mod engine;
mod kubelet;
mod libraries;
mod nodes;
mod pods;
mod scheduler;
mod system;

pub(crate) use kubelet::is_gpu;

use crate::check::{Check, Group, Needs, Severity};

/// A row of the table.
const fn check(
    id: &'static str,
    group: Group,
    severity: Severity,
    needs: Needs,
    title: &'static str,
    run: fn(&crate::Facts<'_>) -> crate::Verdict,
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

use Group::{Cdi, Cluster, Driver, Engine, Kubelet, Libraries, Nodes, Pods};
use Needs::{Either, Node};
use Severity::{Error, Info, Warning};

/// Every check.
pub const ALL: &[Check] = &[
    check("D01", Driver, Error, Node, "a GPU is on the PCI bus", driver::on_the_bus),
    check("D02", Driver, Error, Node, "the kernel's driver is loaded", driver::loaded),
    check("D06", Driver, Error, Node, "nouveau has no GPU", driver::nouveau),
    check(
        "D03",
        Driver,
        Error,
        Node,
        "the driver is new enough for device plugins (384.81)",
        driver::for_plugins,
    ),
    check(
        "D04",
        Driver,
        Error,
        Node,
        "the driver is new enough for containers (418.81.07)",
        driver::for_containers,
    ),
    check("D11", Driver, Error, Node, "every GPU answers", driver::answers),
    check(
        "D08",
        Driver,
        Error,
        Node,
        "every GPU has compute capability 3.0 or more",
        driver::capability,
    ),
    check(
        "D12",
        Driver,
        Warning,
        Node,
        "compute mode lets processes share",
        driver::compute_mode,
    ),
    check(
        "D13",
        Driver,
        Info,
        Node,
        "the driver stays initialised (persistence)",
        driver::persistence,
    ),
    check("D14", Driver, Warning, Node, "MIG is as it was set", driver::mig),
    check("D15", Driver, Error, Node, "AMD's compute driver is there", driver::amd),
    check(
        "D16",
        Driver,
        Error,
        Node,
        "AMD GPUs are partitioned alike",
        driver::amd_partitions,
    ),
    check(
        "D17",
        Driver,
        Error,
        Node,
        "Intel GPUs have their driver and render nodes",
        driver::intel,
    ),
    check(
        "D09",
        Nodes,
        Error,
        Node,
        "device nodes are there, with the driver's numbers",
        nodes::there,
    ),
    check("D10", Nodes, Warning, Node, "/dev/char has links to them", nodes::char_links),
    check("D07", Libraries, Error, Node, "NVML can be loaded", libraries::nvml),
    check(
        "D05",
        Libraries,
        Error,
        Node,
        "libraries and kernel module are of one version",
        libraries::same_version,
    ),
    check("C01", Cdi, Error, Node, "CDI specs fit the driver that is loaded", cdi::fresh),
    check("C02", Cdi, Error, Node, "engines take every CDI spec", cdi::usable),
    check(
        "R01",
        Engine,
        Error,
        Node,
        "the kernel is one for which there are drivers",
        system::linux,
    ),
    check(
        "R02",
        Engine,
        Warning,
        Node,
        "overlay and br_netfilter are loaded, also after a boot",
        system::modules,
    ),
    check(
        "R03",
        Engine,
        Error,
        Node,
        "something puts the driver into containers",
        system::installed,
    ),
    check(
        "R04",
        Engine,
        Warning,
        Node,
        "the toolkit knows this machine's cgroups",
        system::cgroup_v2,
    ),
    check("R05", Engine, Info, Node, "it is known which engine runs pods", engine::which),
    check("R06", Engine, Error, Node, "Docker is new enough", docker::version),
    check(
        "R07",
        Engine,
        Error,
        Node,
        "Docker has a runtime for GPUs, or CDI",
        docker::runtime,
    ),
    check(
        "R08",
        Engine,
        Error,
        Node,
        "containerd's sections are of its file's version",
        engine::version,
    ),
    check(
        "R12",
        Engine,
        Error,
        Node,
        "containerd's CRI plugin is not disabled",
        engine::enabled,
    ),
    check("R11", Engine, Error, Node, "the default runtime is defined", engine::default),
    check(
        "R09",
        Engine,
        Error,
        Node,
        "the runtime handler for GPUs has its program",
        engine::handler,
    ),
    check("R10", Engine, Error, Node, "pods reach it", engine::reached),
    check(
        "R13",
        Engine,
        Error,
        Node,
        "cgroup drivers of kubelet and runtimes agree",
        engine::cgroups,
    ),
    check(
        "R14",
        Engine,
        Error,
        Either,
        "RuntimeClasses name handlers that are there",
        engine::runtime_class,
    ),
    check("R15", Engine, Info, Node, "the engine does CDI", engine::cdi),
    check(
        "R16",
        Engine,
        Warning,
        Node,
        "the engine was restarted since it was configured",
        engine::restarted,
    ),
    check(
        "K18",
        Engine,
        Error,
        Node,
        "divvy-runtime gives a container the GPUs that it asks for",
        kubelet::test_container,
    ),
    check(
        "K02",
        Kubelet,
        Error,
        Node,
        "the kubelet takes device plugins",
        kubelet::socket,
    ),
    check(
        "K03",
        Kubelet,
        Error,
        Either,
        "a device plugin offers GPUs, and is alive",
        kubelet::plugin,
    ),
    check(
        "K06",
        Kubelet,
        Error,
        Either,
        "the kubelet can take the plugin's list of ids",
        kubelet::message,
    ),
    check(
        "K17",
        Kubelet,
        Info,
        Node,
        "exporters can ask which pod has which GPU",
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
        "one device plugin alone has the GPUs of a node",
        cluster::one_plugin,
    ),
    check(
        "K05",
        Cluster,
        Warning,
        Needs::Cluster,
        "nodes carry no resource that is gone",
        cluster::leftovers,
    ),
    check(
        "K19",
        Cluster,
        Warning,
        Needs::Cluster,
        "containers get the driver's libraries",
        cluster::libraries,
    ),
    check(
        "K07",
        Cluster,
        Error,
        Needs::Cluster,
        "the DaemonSets of GPUs find their nodes",
        cluster::labels,
    ),
    check(
        "K08",
        Cluster,
        Error,
        Needs::Cluster,
        "the extender finds a node",
        cluster::extender_node,
    ),
    check(
        "K09",
        Cluster,
        Error,
        Needs::Cluster,
        "taints of nodes with GPUs are tolerated",
        cluster::taints,
    ),
    check(
        "K10",
        Cluster,
        Error,
        Node,
        "kube-scheduler's configuration is of a version that it knows",
        scheduler::version,
    ),
    check(
        "K11",
        Cluster,
        Error,
        Node,
        "kube-scheduler sees its configuration",
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
        "pods ask for GPUs in a way that has an effect",
        pods::requests,
    ),
    check(
        "K14",
        Pods,
        Warning,
        Needs::Cluster,
        "pods leave NVIDIA_VISIBLE_DEVICES alone",
        pods::visible_devices,
    ),
    check(
        "K15",
        Pods,
        Warning,
        Needs::Cluster,
        "pods with images for GPUs ask for one",
        pods::silent,
    ),
    check(
        "K16",
        Pods,
        Warning,
        Needs::Cluster,
        "no pod failed at its admission",
        pods::admission,
    ),
];

/// The check with this id, in any case.
pub fn by_id(id: &str) -> Option<&'static Check> {
    ALL.iter().find(|check| check.id.eq_ignore_ascii_case(id))
}
