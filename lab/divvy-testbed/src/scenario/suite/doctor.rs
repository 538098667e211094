//! The scene about `divvy doctor --cluster` as a user types it: on a healthy cluster, and on one with a fault.

use std::collections::BTreeMap;
use std::io;

use divvy_model::names;
use serde_json::Value;

use super::one_runs;
use crate::builders::pod;
use crate::scenario::{Cluster, ClusterProgram, End, Play, PlayStop};
use crate::story::StoryEvent;

/// The answer of `divvy doctor`: its exit status, and for each check its status and finding.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Said {
    status: Option<i32>,
    checks: BTreeMap<String, (String, String)>,
}

impl Said {
    /// Return the ids of the checks that found a problem.
    fn fired(&self) -> Vec<&str> {
        let wrong = |status: &str| ["WARN", "FAIL"].contains(&status);
        let checks = self.checks.iter().filter(|(_, (status, _))| wrong(status));
        checks.map(|(id, _)| id.as_str()).collect()
    }

    fn is(&self, id: &str, status: &str) -> bool {
        self.checks.get(id).is_some_and(|(is, _)| is == status)
    }

    fn found(&self, id: &str) -> &str {
        self.checks.get(id).map_or("", |(_, found)| found)
    }
}

fn words(url: Option<&String>) -> Vec<&str> {
    let mut words = vec!["doctor", "--cluster"];
    words.extend(url.into_iter().flat_map(|url| ["--extender", url.as_str()]));
    words
}

async fn asked<C: Cluster>(play: &Play<'_, C>) -> Result<Said, PlayStop> {
    let url = play.cluster.extender_url();
    let words = [words(url.as_ref()), vec!["-o", "json"]].concat();
    let output = play.cluster.divvy(&words).output().await?;
    let report: Value = serde_json::from_slice(&output.stdout).map_err(|error| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        PlayStop::Io(io::Error::other(format!(
            "divvy doctor did not print a report: {error}; {said}"
        )))
    })?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let checks = report["checks"].as_array().into_iter().flatten();
    Ok(Said {
        status: output.status.code(),
        checks: checks
            .map(|check| (text(&check["id"]), (text(&check["status"]), text(&check["found"]))))
            .collect(),
    })
}

/// Wait until exactly these checks find a problem, and show their output.
async fn fires<C: Cluster>(play: &mut Play<'_, C>, ids: &[&str], status: i32) -> Result<Said, PlayStop> {
    let what = match ids {
        [] => "doctor to find no problem".to_owned(),
        ids => format!("doctor to find the problem of {}, and no other", ids.join(", ")),
    };
    let said = play
        .eventually(&what, async |play| {
            let said = asked(play).await?;
            Ok(if said.fired() == ids {
                Ok(said)
            } else {
                Err(format!("{said:?}"))
            })
        })
        .await?;
    if !ids.is_empty() {
        let url = play.cluster.extender_url();
        let words = words(url.as_ref());
        let output = play.cluster.divvy(&words).output().await?;
        play.tell(StoryEvent::Command {
            text: format!("divvy {}", words.join(" ")),
            output: String::from_utf8_lossy(&output.stdout).into_owned(),
        })?;
    }
    play.check(
        said.status == Some(status),
        &format!("doctor exits with status {status}"),
        || format!("{said:?}"),
    )?;
    Ok(said)
}

pub(super) async fn play<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("divvy doctor checks a healthy cluster").await?;
    let (node, _) = one_runs(play, "one").await?;
    let said = fires(play, &[], 0).await?;
    let silent = said.checks.iter().find(|(_, (_, found))| found.is_empty());
    play.check(
        silent.is_none(),
        "every check reports a finding or the reason why it does not apply",
        || format!("{silent:?}"),
    )?;
    // If Divvy's programs are processes of the host, the objects of Divvy's chart are missing.
    let of_chart: &[&str] = if play.cluster.agents_are_pods() {
        &["K04", "K07", "K08"]
    } else {
        &[]
    };
    for id in ["K01", "K03", "K05", "K06", "K09", "K12", "K13", "K14", "K15", "K16"]
        .iter()
        .chain(of_chart)
    {
        play.check(said.is(id, "PASS"), &format!("{id} passes: {}", said.found(id)), || {
            format!("{said:?}")
        })?;
    }
    let called = said.found("K12").to_owned();
    play.check(
        called.contains("filter calls") && !called.contains(" 0 filter calls"),
        "kube-scheduler calls the extender that doctor queried",
        || called.clone(),
    )?;

    play.scene("A pod sets NVIDIA_VISIBLE_DEVICES itself").await?;
    let greedy = pod("greedy").env(names::VISIBLE_DEVICES, "all").select(&node);
    play.create(&greedy, "asks for no GPU, and sets NVIDIA_VISIBLE_DEVICES=all")
        .await?;
    let said = fires(play, &["K14"], 1).await?;
    let found = said.found("K14").to_owned();
    play.check(found.contains("default/greedy (all)"), "K14 names the pod", || found.clone())?;
    play.delete_quietly("greedy").await?;
    fires(play, &[], 0).await?;

    play.scene("The extender is stopped").await?;
    play.cluster.stop(ClusterProgram::Extender, End::Stopped).await?;
    play.step("stopped", "the extender", "", Vec::new())?;
    fires(play, &["K12"], 2).await?;
    play.cluster.start(ClusterProgram::Extender).await?;
    play.step("started", "the extender", "", Vec::new())?;
    // kube-scheduler has not called the new extender yet. The pods that were placed earlier prove that it called the previous one.
    fires(play, &[], 0).await?;

    play.scene("The agent of a node is stopped").await?;
    play.cluster.stop(ClusterProgram::Agent(&node), End::Stopped).await?;
    play.step("stopped", &format!("the agent of {node}"), "", Vec::new())?;
    // The agent, a pod of a DaemonSet, is stopped by removing the label from its node. K07 finds that.
    let of_it: &[&str] = if play.cluster.agents_are_pods() {
        &["K03", "K07"]
    } else {
        &["K03"]
    };
    let said = fires(play, of_it, 1).await?;
    let found = said.found("K03").to_owned();
    play.check(found.contains(&node), &format!("K03 names node {node}"), || found.clone())?;
    play.cluster.start(ClusterProgram::Agent(&node)).await?;
    play.step("started", &format!("the agent of {node}"), "", Vec::new())?;
    fires(play, &[], 0).await.map(drop)
}
