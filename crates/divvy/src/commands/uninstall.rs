//! `divvy uninstall`: finds Divvy's objects in a cluster, and removes them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use divvy_kube::objects::PodObject;
use divvy_kube::{client, in_words, list};
use divvy_model::names;
use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use super::inspect::choice;
use super::say;
use crate::cli::uninstall::{UninstallArgs, UninstallOutput};
use crate::printer;
use crate::uninstall::{self, Directories, InstalledKind, InstalledParts, KINDS, LEASE, NodeLeft, Release, RemovedObject};

/// The number of objects to request in one page of a list.
const PAGE: u32 = 500;
/// The pause between two reads of the remaining objects.
const LOOK: Duration = Duration::from_millis(500);
/// How long Divvy's resources must stay removed before they count as gone. A kubelet that still has a resource writes it to the
/// node's status again within 10 s.
const QUIET: Duration = Duration::from_secs(25);
/// The time limit for Divvy's pods to end.
const PODS_GONE: Duration = Duration::from_secs(60);

/// Print what would be removed; with `--yes`, remove it.
pub async fn run(args: UninstallArgs) -> anyhow::Result<()> {
    let client = client::connect(&choice(&args.cluster)).await?.client;
    let release = Release {
        name: args.name.clone(),
        namespace: args.namespace.clone(),
    };
    let found = find(&client, &release).await?;
    if args.yes {
        if let Some(why) = uninstall::refusal(&found, &release, args.force) {
            anyhow::bail!("{why}");
        }
        remove(&client, &release, &found, &args).await?;
    }
    match args.output {
        Some(UninstallOutput::Json) => printer::json(&UninstallAnswer {
            removed: args.yes,
            found: &found,
        }),
        None => Ok(printer::print(&uninstall::text(&found, &release, args.labels, args.yes))?),
    }
}

#[derive(serde::Serialize)]
struct UninstallAnswer<'a> {
    /// True with `--yes`: everything in `found` was removed. False: nothing was changed.
    removed: bool,
    #[serde(flatten)]
    found: &'a InstalledParts,
}

fn resource(kind: InstalledKind) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(kind.group, kind.version, kind.kind), kind.plural)
}

/// Return the API for a kind in one namespace. With `None`, return the API for all namespaces, or for a kind that is not
/// namespaced.
fn api(client: &Client, kind: InstalledKind, namespace: Option<&str>) -> Api<DynamicObject> {
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource(kind)),
        None => Api::all_with(client.clone(), &resource(kind)),
    }
}

fn nodes_api(client: &Client) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", "Node"), "nodes");
    Api::all_with(client.clone(), &kind)
}

/// Convert a failed request to an error. If permission is missing, the error contains the command that checks the permission.
fn refused(what: &str, right: &str, error: &kube::Error) -> anyhow::Error {
    let text = format!("{what}: {}", in_words(error));
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            anyhow::anyhow!("{text}. You lack a permission; check it with kubectl auth can-i {right}")
        }
        _ => anyhow::anyhow!(text),
    }
}

/// Read a list page by page, and call `take` for each object.
async fn each(api: &Api<DynamicObject>, selector: Option<&str>, mut take: impl FnMut(DynamicObject)) -> kube::Result<()> {
    let mut params = ListParams::default().limit(PAGE);
    params.label_selector = selector.map(str::to_owned);
    loop {
        let page = api.list(&params).await?;
        page.items.into_iter().for_each(&mut take);
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(());
        }
    }
}

async fn find(client: &Client, release: &Release) -> anyhow::Result<InstalledParts> {
    let mut found = InstalledParts {
        objects: Vec::new(),
        helm: None,
        nodes: nodes_left(client).await?,
        pods: Vec::new(),
        waiting: 0,
        directories: Directories::default(),
    };
    for kind in KINDS {
        // Divvy has Roles in kube-system as well, so all kinds but the Lease are listed in all namespaces.
        let api = api(client, kind, (kind == LEASE).then_some(release.namespace.as_str()));
        let mut take = |object: DynamicObject| {
            let annotation = |key: &str| object.metadata.annotations.as_ref().and_then(|all| all.get(key).cloned());
            found.helm = found.helm.take().or(annotation("meta.helm.sh/release-name"));
            if kind.kind == "DaemonSet"
                && let Some(directories) = Directories::of(&whole(&object))
            {
                found.directories = directories;
            }
            found.objects.push(RemovedObject {
                kind: kind.kind,
                namespace: object.metadata.namespace,
                name: object.metadata.name.unwrap_or_default(),
            });
        };
        let answer = if kind == LEASE {
            api.get_opt(&release.lease())
                .await
                .map(|lease| lease.into_iter().for_each(&mut take))
        } else {
            each(&api, Some(&release.selector()), take).await
        };
        match answer {
            // An API server that does not know this kind has no objects of it.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => other.map_err(|error| {
                let plural = full(kind);
                match (kind == LEASE, kind.namespaced) {
                    (true, _) => refused(
                        &format!("the Lease {} could not be read", release.lease()),
                        &format!("get {plural} -n {}", release.namespace),
                        &error,
                    ),
                    (false, true) => refused(
                        &format!("the {plural} could not be listed"),
                        &format!("list {plural} -A"),
                        &error,
                    ),
                    (false, false) => refused(
                        &format!("the {plural} could not be listed"),
                        &format!("list {plural}"),
                        &error,
                    ),
                }
            })?,
        }
    }
    let nodes = list::nodes(client).await?;
    let (mut pods, mut waiting) = (Vec::new(), 0);
    list::each_pod(
        client,
        None,
        |object: PodObject| list::pod_of(object),
        |pod| {
            waiting += u64::from(pod.node.is_none() && !pod.ended() && uninstall::serves(&pod, &nodes));
            pods.extend(uninstall::holder(&pod, &nodes));
        },
    )
    .await?;
    (found.pods, found.waiting) = (pods, waiting);
    Ok(found)
}

/// Return the plural of a kind with its API group, in the form that `kubectl auth can-i` takes: `daemonsets.apps`.
fn full(kind: InstalledKind) -> String {
    match kind.group {
        "" => kind.plural.to_owned(),
        group => format!("{}.{group}", kind.plural),
    }
}

async fn nodes_left(client: &Client) -> anyhow::Result<Vec<NodeLeft>> {
    let mut nodes = Vec::new();
    let api = nodes_api(client);
    let listed = each(&api, None, |node| {
        nodes.extend(uninstall::node_left(&whole(&node)));
    });
    listed
        .await
        .map_err(|error| refused("the nodes could not be listed", "list nodes", &error))?;
    nodes.sort_by(|a: &NodeLeft, b| a.name.cmp(&b.name));
    Ok(nodes)
}

fn whole(object: &DynamicObject) -> Value {
    serde_json::to_value(object).unwrap_or_default()
}

/// Remove everything. All requests are first sent as a dry run, which shows missing permissions before anything is removed.
async fn remove(client: &Client, release: &Release, found: &InstalledParts, args: &UninstallArgs) -> anyhow::Result<()> {
    let objects = || found.objects.iter().filter_map(|object| Some((object, object.of()?)));
    for (object, kind) in objects() {
        delete(client, object, kind, true).await.context("nothing was removed")?;
    }
    for node in found.nodes.iter().filter(|node| node.has_something(args.labels)) {
        clean(client, node, args.labels, true).await.context("nothing was removed")?;
    }
    let is_workload = |kind: InstalledKind| kind.group == "apps";
    for (object, kind) in objects().filter(|(_, kind)| is_workload(*kind)) {
        delete(client, object, kind, false).await?;
    }
    pods_gone(client, release).await?;
    for (object, kind) in objects().filter(|(_, kind)| !is_workload(*kind)) {
        delete(client, object, kind, false).await?;
    }
    // An agent may have written its inventory again just before it ended.
    let mut left: BTreeMap<String, NodeLeft> = BTreeMap::new();
    for node in found.nodes.iter().cloned().chain(nodes_left(client).await?) {
        left.insert(node.name.clone(), node);
    }
    for node in left.values().filter(|node| node.has_something(args.labels)) {
        clean(client, node, args.labels, false).await?;
    }
    forgotten(client, args).await
}

async fn delete(client: &Client, object: &RemovedObject, kind: InstalledKind, dry_run: bool) -> anyhow::Result<()> {
    let params = DeleteParams {
        dry_run,
        ..DeleteParams::background()
    };
    match api(client, kind, object.namespace.as_deref())
        .delete(&object.name, &params)
        .await
    {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other.map(drop).map_err(|error| {
            let namespace = object.namespace.as_ref().map(|namespace| format!(" -n {namespace}"));
            let right = format!("delete {}/{}{}", full(kind), object.name, namespace.unwrap_or_default());
            refused(&format!("{object} could not be deleted"), &right, &error)
        }),
    }
}

/// Remove Divvy's annotations, resources, and labels from a node; with `labels`, also remove the label `gpushare=true`.
async fn clean(client: &Client, node: &NodeLeft, labels: bool, dry_run: bool) -> anyhow::Result<()> {
    let api = nodes_api(client);
    let params = PatchParams {
        dry_run,
        ..PatchParams::default()
    };
    let none = |keys: Vec<&str>| -> Value {
        keys.into_iter()
            .map(|key| (key.to_owned(), Value::Null))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let mut metadata = serde_json::Map::new();
    if !node.annotations.is_empty() {
        metadata.insert(
            "annotations".to_owned(),
            none(node.annotations.iter().map(String::as_str).collect()),
        );
    }
    let gpushare = (labels && node.labelled).then_some("gpushare");
    let labels: Vec<&str> = node.labels.iter().map(String::as_str).chain(gpushare).collect();
    if !labels.is_empty() {
        metadata.insert("labels".to_owned(), none(labels));
    }
    let gone = |result: kube::Result<DynamicObject>, right: &str| match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other
            .map(drop)
            .map_err(|error| refused(&format!("node {} could not be changed", node.name), right, &error)),
    };
    if !metadata.is_empty() {
        let patch = Patch::Merge(json!({"metadata": metadata}));
        gone(api.patch(&node.name, &params, &patch).await, "patch nodes")?;
    }
    if !node.resources.is_empty() {
        let resources = none(node.resources.iter().map(AsRef::as_ref).collect());
        let patch = Patch::Merge(json!({"status": {"capacity": resources, "allocatable": resources}}));
        gone(
            api.patch_status(&node.name, &params, &patch).await,
            "patch nodes --subresource=status",
        )?;
    }
    Ok(())
}

/// Wait until none of Divvy's pods exists, because an agent that still runs would write its inventory again.
async fn pods_gone(client: &Client, release: &Release) -> anyhow::Result<()> {
    let kind = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", "Pod"), "pods");
    let pods: Api<DynamicObject> = Api::namespaced_with(client.clone(), &release.namespace, &kind);
    let until = Instant::now() + PODS_GONE;
    loop {
        let mut left = Vec::new();
        let listed = each(&pods, Some(&release.selector()), |pod| left.extend(pod.metadata.name)).await;
        listed.map_err(|error| {
            refused(
                "the pods could not be listed",
                &format!("list pods -n {}", release.namespace),
                &error,
            )
        })?;
        if left.is_empty() {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < until,
            "after {} s pods of Divvy still exist: {}. Check that their nodes are ready (kubectl get nodes), and run this command again; \
             the workloads of agents and extender are deleted, and nothing else is",
            PODS_GONE.as_secs(),
            left.join(", ")
        );
        tokio::time::sleep(LOOK).await;
    }
}

/// Remove the resources from the nodes again and again, until no kubelet has restored them for [`QUIET`].
async fn forgotten(client: &Client, args: &UninstallArgs) -> anyhow::Result<()> {
    if args.timeout.is_zero() {
        return Ok(());
    }
    let began = Instant::now();
    let (mut quiet_since, mut told) = (began, false);
    while quiet_since.elapsed() < QUIET {
        tokio::time::sleep(LOOK).await;
        let left = nodes_left(client).await?;
        let again: Vec<&NodeLeft> = left.iter().filter(|node| node.has_something(false)).collect();
        let Some(first) = again.first() else { continue };
        quiet_since = Instant::now();
        anyhow::ensure!(
            began.elapsed() < args.timeout,
            "everything else is removed, but {} still {} {}, for example node {}. If no other agent or device plugin runs there, run this command again: \
             a kubelet drops the resources five minutes after the agent has ended",
            match again.len() {
                1 => "1 node".to_owned(),
                count => format!("{count} nodes"),
            },
            if again.len() == 1 { "offers" } else { "offer" },
            names::GPU_MEM,
            first.name
        );
        if !told {
            say(
                "Kubelets restore aliyun.com/gpu-mem for up to five minutes after the agent has ended. Waiting for that; you can also press Ctrl-C and run this command again later.",
            )?;
            told = true;
        }
        for node in again {
            clean(client, node, args.labels, false).await?;
        }
    }
    Ok(())
}
