//! The requests about the pods of a run.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::bail;
use divvy_explainer::from_objects;
use divvy_explainer::read_cluster::read_without_waiting;
use divvy_kube::in_words;
use divvy_kube::objects::{self, PodObject};
use divvy_model::{Health, Inventory, MemoryUnit, names};
use divvy_smoke_run::{Mark, Planned, RUN_LABEL, RunEvent, TestPodSettings, TestPodState, TestTarget};
use futures::{Stream, StreamExt as _, stream};
use jiff::{SignedDuration, Timestamp};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::wait::await_condition;
use kube::runtime::watcher::{self, Event as Watched};
use serde_json::Value;

use crate::printer;
use crate::why::{self, AnswerStyle};

/// The time limit for one request.
pub(super) const ANSWER: Duration = Duration::from_secs(15);
/// The time limit for reading the cluster.
const READ: Duration = Duration::from_secs(120);
/// The age of the pods that a run left behind when it was killed. A run that is still at work has younger ones.
const OLD: SignedDuration = SignedDuration::from_hours(1);
/// The number of pods of earlier runs to look at.
const MOST_OLD: u32 = 200;

/// What the watch reports.
pub(super) enum PodChange {
    /// A pod is new, or has changed.
    Pod(usize, Box<DynamicObject>),
    /// A pod is gone.
    Gone(usize),
    /// The user may not watch pods.
    Forbidden(kube::Error),
}

/// The pods of a run.
pub(super) struct TestPods {
    api: Api<DynamicObject>,
    client: kube::Client,
    settings: TestPodSettings,
    planned: Vec<Planned>,
    is_kept: bool,
    /// Whether a manifest was shown. One is enough: those of the other pods are alike.
    has_shown: AtomicBool,
}

impl TestPods {
    pub(super) fn new(client: kube::Client, settings: TestPodSettings, planned: Vec<Planned>, is_kept: bool) -> TestPods {
        TestPods {
            api: Api::namespaced_with(client.clone(), &settings.namespace, &objects::pods()),
            client,
            settings,
            planned,
            is_kept,
            has_shown: AtomicBool::new(false),
        }
    }

    pub(super) fn name(&self, number: usize) -> String {
        self.settings.name(number)
    }

    pub(super) fn run(&self) -> &str {
        self.settings.run.as_str()
    }

    /// Read a pod's object.
    pub(super) fn seen(object: &DynamicObject) -> TestPodState {
        TestPodState::of(&serde_json::to_value(object).unwrap_or(Value::Null))
    }

    /// Return the error for a user who lacks rights on the pods.
    pub(super) fn forbidden(&self, what: &str, error: &kube::Error) -> anyhow::Error {
        anyhow::anyhow!(
            "the pods in namespace {0} could not be {what}: {1}; you need the rights to list, watch, create, and delete pods there: kubectl auth can-i create pods -n {0}",
            self.settings.namespace,
            in_words(error)
        )
    }

    /// Remove the pods of runs that were killed.
    pub(super) async fn remove_old(&self) -> anyhow::Result<()> {
        let params = ListParams::default().labels(RUN_LABEL).limit(MOST_OLD);
        let list = tokio::time::timeout(ANSWER, self.api.list_metadata(&params)).await;
        let list = list
            .map_err(|_| anyhow::anyhow!("the API server did not answer within {} s", ANSWER.as_secs()))?
            .map_err(|error| self.forbidden("listed", &error))?;
        let old = Timestamp::now() - OLD;
        for object in list.items {
            let is_old = object.metadata.creation_timestamp.is_some_and(|created| created.0 < old);
            let Some(name) = object.metadata.name.filter(|_| is_old) else {
                continue;
            };
            if let Err(error) = self.api.delete(&name, &DeleteParams::default()).await {
                tracing::warn!("the pod {name} of an earlier run could not be deleted: {}", in_words(&error));
            }
        }
        Ok(())
    }

    pub(super) async fn create(&self, number: usize) -> RunEvent {
        let Some((target, Ok(ask))) = self.planned.get(number).map(|planned| (&planned.target, &planned.ask)) else {
            return RunEvent::Unclear(number, "it is not to be tried".to_owned());
        };
        if target.failed_before.is_some()
            && let Err(why) = self.open_for_test(target).await
        {
            return RunEvent::Refused {
                number,
                why: format!("the GPU is out of service, and was not opened for the test: {why}"),
                tried: None,
            };
        }
        let manifest = self.settings.pod(number, target, *ask);
        let object: DynamicObject = match serde_json::from_value(manifest.clone()) {
            Ok(object) => object,
            Err(error) => return RunEvent::Unclear(number, error.to_string()),
        };
        match tokio::time::timeout(ANSWER, self.api.create(&PostParams::default(), &object)).await {
            Ok(Ok(_)) => RunEvent::Created(number),
            // With these codes the API server has changed nothing.
            Ok(Err(error @ kube::Error::Api(_))) if has_changed_nothing(&error) => {
                let is_first = !self.has_shown.swap(true, Ordering::Relaxed);
                let tried = is_first.then(|| printer::yaml_text(&manifest).ok()).flatten();
                RunEvent::Refused {
                    number,
                    why: format!("the API server refused the pod: {}", in_words(&error)),
                    tried: tried.map(|yaml| format!("This was tried:\n{yaml}")),
                }
            }
            Ok(Err(error)) => RunEvent::Unclear(number, in_words(&error)),
            Err(_) => RunEvent::Unclear(number, format!("no answer within {} s", ANSWER.as_secs())),
        }
    }

    /// Write the mark of a GPU on its node.
    pub(super) async fn mark(&self, number: usize, mark: Mark) -> RunEvent {
        let Some(planned) = self.planned.get(number) else {
            return RunEvent::Marked(number, Some("it was not to be tried".to_owned()));
        };
        let written = self.write(&planned.target, &mark).await;
        RunEvent::Marked(number, written.err().map(|error| error.to_string()))
    }

    /// Let this run test a GPU that is out of service. Wait until its agent says so: if the extender refused the pod before, kube-scheduler would not
    /// try again soon.
    async fn open_for_test(&self, target: &TestTarget) -> anyhow::Result<()> {
        self.write(target, &Mark::Testing).await?;
        let nodes: Api<DynamicObject> = Api::all_with(self.client.clone(), &objects::nodes());
        let is_open = |node: Option<&DynamicObject>| {
            let text = node.and_then(|node| node.metadata.annotations.as_ref()?.get(names::INVENTORY));
            let inventory = text.and_then(|text| Inventory::parse(text).ok());
            let mut gpus = inventory.iter().flat_map(|inventory| &inventory.gpus);
            gpus.any(|gpu| {
                gpu.uuid == target.uuid && gpu.health == Health::Testing && gpu.test.as_ref() == Some(&self.settings.run)
            })
        };
        match tokio::time::timeout(ANSWER, await_condition(nodes, &target.node, is_open)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => bail!("the node cannot be watched: {error}"),
            Err(_) => bail!(
                "the agent of node {} did not open it within {} s; divvy doctor --cluster finds out whether it runs",
                target.node,
                ANSWER.as_secs()
            ),
        }
    }

    /// Write a mark on the node of a GPU.
    async fn write(&self, target: &TestTarget, mark: &Mark) -> anyhow::Result<()> {
        let nodes: Api<DynamicObject> = Api::all_with(self.client.clone(), &objects::nodes());
        let (params, patch) = (PatchParams::default(), mark.patch(&target.uuid, self.run()));
        let patch = Patch::Merge(&patch);
        match tokio::time::timeout(ANSWER, nodes.patch_metadata(&target.node, &params, &patch)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => bail!(in_words(&error)),
            Err(_) => bail!("no answer within {} s", ANSWER.as_secs()),
        }
    }

    pub(super) async fn delete(&self, number: usize) -> RunEvent {
        if self.is_kept {
            return RunEvent::Deleted(number);
        }
        let name = self.name(number);
        match tokio::time::timeout(ANSWER, self.api.delete(&name, &DeleteParams::default())).await {
            Ok(Ok(_)) => RunEvent::Deleted(number),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => RunEvent::Deleted(number),
            Ok(Err(error)) => RunEvent::Undeletable(number, in_words(&error)),
            Err(_) => RunEvent::Undeletable(number, format!("no answer within {} s", ANSWER.as_secs())),
        }
    }

    /// Explain why these pods wait, as `divvy why` does. The cluster is read once.
    pub(super) async fn explain(&self, waiting: Vec<(usize, DynamicObject)>) -> RunEvent {
        let read = tokio::time::timeout(READ, read_without_waiting(&self.client, MemoryUnit::GIB)).await;
        let snapshot = match read {
            Ok(Ok(reading)) => reading.snapshot,
            // The scheduler's own message remains.
            Ok(Err(error)) => {
                tracing::debug!("{error}");
                return RunEvent::Explained(Vec::new());
            }
            Err(_) => return RunEvent::Explained(Vec::new()),
        };
        let answers = waiting.into_iter().filter_map(|(number, object)| {
            let object: PodObject = serde_json::from_value(serde_json::to_value(object).ok()?).ok()?;
            let wants = from_objects::wants(&object).ok()?;
            let answer = divvy_why::answer(&snapshot, &wants, false);
            Some((number, why::text(&answer, AnswerStyle::default())))
        });
        RunEvent::Explained(answers.collect())
    }

    /// Watch the pods of this run.
    pub(super) fn watch(&self) -> impl Stream<Item = PodChange> + use<'_> {
        let config = watcher::Config::default().labels(&format!("{RUN_LABEL}={}", self.settings.run));
        // The pods that the watch knows, and those of a list that is under way.
        let (mut known, mut listed) = (BTreeSet::new(), BTreeSet::new());
        let number = |object: &DynamicObject| self.settings.number(object.metadata.name.as_deref()?);
        let events = watcher::watcher(self.api.clone(), config).default_backoff();
        events.flat_map(move |event| {
            let changes: Vec<PodChange> = match event {
                Ok(Watched::Init) => {
                    listed.clear();
                    Vec::new()
                }
                Ok(Watched::InitApply(object) | Watched::Apply(object)) => match number(&object) {
                    Some(number) => {
                        known.insert(number);
                        listed.insert(number);
                        vec![PodChange::Pod(number, Box::new(object))]
                    }
                    None => Vec::new(),
                },
                // What the list lacks went while nothing was watched.
                Ok(Watched::InitDone) => {
                    let gone: Vec<usize> = known.difference(&listed).copied().collect();
                    known.retain(|number| listed.contains(number));
                    gone.into_iter().map(PodChange::Gone).collect()
                }
                Ok(Watched::Delete(object)) => match number(&object) {
                    Some(number) => {
                        known.remove(&number);
                        vec![PodChange::Gone(number)]
                    }
                    None => Vec::new(),
                },
                Err(error) => refusal(error).map(PodChange::Forbidden).into_iter().collect(),
            };
            stream::iter(changes)
        })
    }
}

fn has_changed_nothing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 400 | 401 | 403 | 404 | 409 | 422 | 429))
}

/// Return the API server's answer that the user lacks a right. The watch repeats after every other error.
fn refusal(error: watcher::Error) -> Option<kube::Error> {
    let source = match error {
        watcher::Error::InitialListFailed(source)
        | watcher::Error::WatchStartFailed(source)
        | watcher::Error::WatchFailed(source) => source,
        watcher::Error::WatchError(status) => kube::Error::Api(status),
        other => {
            tracing::debug!("{other}");
            return None;
        }
    };
    match &source {
        kube::Error::Api(status) if matches!(status.code, 401 | 403) => Some(source),
        _ => {
            tracing::debug!("{}", in_words(&source));
            None
        }
    }
}
