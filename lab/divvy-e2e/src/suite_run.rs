//! One run of scenes on one kind of cluster.

use std::fmt;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use divvy_testbed::embedded::{Embedded, EmbeddedSettings};
use divvy_testbed::programs::{GpuPrograms, Programs};
use divvy_testbed::scenario::suite::Scene;
use divvy_testbed::scenario::{BUILT_IN, Churn, Play, RunsGpuPrograms};
use divvy_testbed::story::{StoryEvent, StoryListener, TimedEvent};
use futures::StreamExt as _;

use crate::real::Real;
use crate::say;

/// The options with which scenes are played.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leg {
    pub(crate) churn: Churn,
    pub(crate) quiet: bool,
    /// Whether the user has named the scenes.
    pub(crate) are_named: bool,
}

/// The results of the scenes.
#[derive(Debug, Default)]
pub(crate) struct SuiteSum {
    cluster: &'static str,
    scenes: usize,
    checks: u64,
    failures: u64,
    /// The scenes in which a check failed or that could not go on.
    failed: Vec<&'static str>,
    /// The scenes that this cluster cannot play, with the reason.
    skipped: Vec<(&'static str, &'static str)>,
    time: Duration,
}

impl SuiteSum {
    pub(crate) fn holds(&self) -> bool {
        self.failed.is_empty()
    }

    /// Return the scenes that were not played, with the reason.
    pub(crate) fn skips(&self) -> impl Iterator<Item = (String, &'static str)> {
        let named = |(scene, reason): &(&str, &'static str)| (format!("{}: scene {scene}", self.cluster), *reason);
        self.skipped.iter().map(named)
    }

    fn add(&mut self, scene: Scene, outcome: &SceneOutcome) {
        let name = scene.about().0;
        match outcome {
            SceneOutcome::Skipped(reason) => self.skipped.push((name, reason)),
            SceneOutcome::Played { checks, failures, ended } => {
                self.scenes += 1;
                self.checks += checks;
                self.failures += failures;
                if *failures > 0 || !ended {
                    self.failed.push(name);
                }
            }
        }
    }
}

impl fmt::Display for SuiteSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, checks) = (self.checks - self.failures, self.checks);
        write!(
            f,
            "{}: {} scenes in {} s, {held} of {checks} checks hold",
            self.cluster,
            self.scenes,
            self.time.as_secs()
        )?;
        for (scene, reason) in &self.skipped {
            write!(f, "; SKIPPED {scene}: {reason}")?;
        }
        if !self.failed.is_empty() {
            write!(f, "; FAILED: {}", self.failed.join(", "))?;
        }
        Ok(())
    }
}

enum SceneOutcome {
    Skipped(&'static str),
    Played { checks: u64, failures: u64, ended: bool },
}

impl Leg {
    /// Play each scene on a new embedded cluster, several at once. The story of a scene is printed when the scene has ended.
    pub(crate) async fn embedded(self, scenes: &[Scene], jobs: usize, seed: u64) -> io::Result<SuiteSum> {
        let divvy = std::env::current_exe()?.with_file_name("divvy");
        let programs = Programs::beside(&divvy)?;
        let gpu_programs = if scenes.iter().any(|scene| scene.runs_programs()) {
            Some(GpuPrograms::beside(&divvy)?)
        } else {
            None
        };
        let refusal = match &gpu_programs {
            Some(programs) => programs.check().await.err(),
            None => None,
        };
        let began = Instant::now();
        let mut sum = SuiteSum {
            cluster: "embedded cluster",
            ..SuiteSum::default()
        };
        let played = scenes.iter().map(|scene| {
            let settings = EmbeddedSettings {
                seed,
                drivers: true,
                gpu_programs: gpu_programs.clone().filter(|_| scene.runs_programs()),
                audit: false,
                ..EmbeddedSettings::new(BUILT_IN, programs.clone())
            };
            let refusal = refusal.as_ref().filter(|_| scene.runs_programs()).map(ToString::to_string);
            async move {
                let mut teller = Teller::default();
                if let Some(refusal) = refusal {
                    teller.add(&format!("{refusal}\n"));
                    let outcome = SceneOutcome::Skipped("this user may start no programs with mounts of their own");
                    return Ok((*scene, outcome, teller.text));
                }
                let mut cluster = Embedded::start(settings).await?;
                let outcome = self.play(*scene, &mut cluster, &mut teller).await;
                cluster.shutdown().await;
                io::Result::Ok((*scene, outcome, teller.text))
            }
        });
        let mut played = futures::stream::iter(played).buffer_unordered(jobs);
        while let Some(result) = played.next().await {
            let (scene, outcome, text) = result?;
            sum.add(scene, &outcome);
            if !self.quiet || matches!(outcome, SceneOutcome::Played { failures, ended, .. } if failures > 0 || !ended) {
                say(&text);
            }
        }
        sum.time = began.elapsed();
        Ok(sum)
    }

    /// Play the scenes on the cluster whose state is in this directory. The error is `NotFound` if there is none.
    pub(crate) async fn real(self, scenes: &[Scene], directory: &Path) -> io::Result<SuiteSum> {
        let mut cluster = Real::open(directory).await?;
        let began = Instant::now();
        let mut sum = SuiteSum {
            cluster: "real Kubernetes",
            ..SuiteSum::default()
        };
        let mut teller = Teller {
            at_once: !self.quiet,
            ..Teller::default()
        };
        Play::new(&mut cluster, &mut teller, Duration::ZERO)
            .begin()
            .await
            .map_err(io::Error::other)?;
        for scene in scenes {
            let outcome = match scene {
                // Along with other work, three nodes and a control plane leave too little of two processors for what it measures.
                Scene::Attacks if !self.are_named => SceneOutcome::Skipped(
                    "it measures how soon agents answer and pods start, so nothing else may run at the same time: cargo xtask suite --on real attacks",
                ),
                _ => self.play(*scene, &mut cluster, &mut teller).await,
            };
            sum.add(*scene, &outcome);
            let text = std::mem::take(&mut teller.text);
            let ended = match outcome {
                SceneOutcome::Played { failures, ended, .. } => {
                    if self.quiet && (failures > 0 || !ended) {
                        say(&text);
                    }
                    ended
                }
                SceneOutcome::Skipped(_) => true,
            };
            // A scene that could not go on may have left anything behind, so the results of later scenes would mean nothing.
            if !ended {
                break;
            }
        }
        sum.time = began.elapsed();
        Ok(sum)
    }

    async fn play<C: RunsGpuPrograms>(self, scene: Scene, cluster: &mut C, teller: &mut Teller) -> SceneOutcome {
        if scene.needs().iter().any(|machine| cluster.node_of(*machine).is_none()) {
            return SceneOutcome::Skipped("this cluster has no second node");
        }
        if scene.runs_plugin() && !cluster.has_plugin() {
            return SceneOutcome::Skipped("this cluster was not installed from Divvy's image; run: cargo xtask cluster install");
        }
        let mut play = Play::new(cluster, teller, Duration::ZERO);
        let result = match scene.play(&mut play, self.churn).await {
            // The next scene expects a cluster without pods.
            Ok(()) => play.clear().await,
            Err(stop) => Err(stop),
        };
        let (checks, failures) = play.score();
        if let Err(stop) = &result {
            teller.add(&format!("    FAILED  the scene could not go on: {stop}\n"));
        }
        SceneOutcome::Played {
            checks,
            failures,
            ended: result.is_ok(),
        }
    }
}

/// A listener that keeps the story, and prints it at once if requested.
#[derive(Debug, Default)]
struct Teller {
    text: String,
    at_once: bool,
}

impl Teller {
    fn add(&mut self, text: &str) {
        if self.at_once {
            say(text);
        }
        self.text.push_str(text);
    }
}

impl StoryListener for Teller {
    fn hear(&mut self, told: &TimedEvent) -> io::Result<()> {
        // With the time, because readers look for slow steps.
        let text = match &told.event {
            StoryEvent::Scene { .. } => told.event.to_string(),
            event => format!("{:>7.2} {event}", told.ms as f64 / 1000.0),
        };
        self.add(&text);
        Ok(())
    }
}
