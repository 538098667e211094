//! Which pod each process belongs to. nvidia-smi does not have this list. Its column for the process's name is too narrow for the names of pods, so
//! they are in a list of their own below, in the same style.

use crate::cell::{double_rule, keep_end, line, row};
use crate::edition::Edition;
use crate::processes::place;
use crate::value::{ProcessPod, Smi};

/// Add the list, if a process belongs to a pod.
pub(crate) fn draw(out: &mut String, smi: &Smi, edition: Edition) {
    let inner = edition.inner();
    let mut owned = smi
        .processes
        .iter()
        .filter_map(|process| Some((process, process.pod.as_ref()?)))
        .peekable();
    if owned.peek().is_none() {
        return;
    }
    out.push_str(&edition.gap());
    line(out, &[inner]);
    row(out, &[(inner, " Pods:".to_owned())]);
    let pid = if edition < Edition::R570 {
        "       PID"
    } else {
        "             PID"
    };
    row(out, &[(inner, format!("  GPU   GI   CI {pid}   Namespace/Pod/Container"))]);
    row(out, &[(inner, "        ID   ID".to_owned())]);
    double_rule(out, &[inner]);
    for (process, owner) in owned {
        let place = place(process, edition);
        let room = inner - place.len() - 4;
        row(out, &[(inner, format!("{place}   {}", keep_end(&name(owner), room)))]);
    }
    line(out, &[inner]);
}

fn name(owner: &ProcessPod) -> String {
    match (&owner.namespace, &owner.name) {
        (Some(namespace), Some(pod)) if owner.containers.is_empty() => format!("{namespace}/{pod}"),
        (Some(namespace), Some(pod)) => format!("{namespace}/{pod}/{}", owner.containers.join(",")),
        _ => format!("UID {}", owner.uid),
    }
}
