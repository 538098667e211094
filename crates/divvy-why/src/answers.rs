use std::collections::BTreeMap;

use crate::{Answer, ClusterSnapshot, PodName, PodState, Wants, answer};

/// Compute the answers in the order of the pods. Equal pods of one controller share an answer.
pub fn answers(snapshot: &ClusterSnapshot, asked: &[Wants], all_nodes: bool) -> Vec<Answer> {
    let mut kinds: Vec<(&Wants, Answer)> = Vec::new();
    // Only pods of the same controller can be equal, so each pod is compared with few others.
    let mut of_owner: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    let mut running: BTreeMap<_, usize> = BTreeMap::new();
    for wants in asked {
        let known = of_owner.entry((&wants.pod.namespace, &wants.owner)).or_default();
        match known.iter().find(|kind| kinds[**kind].0.is_like(wants)) {
            Some(kind) => kinds[*kind].1.subject.pods.push(PodName {
                namespace: wants.pod.namespace.clone(),
                name: wants.pod.name.clone(),
            }),
            None => {
                let answer = answer(snapshot, wants, all_nodes);
                let runs = wants.owner.is_some() && runs_well(wants, &answer);
                match running.get(&(&wants.pod.namespace, &wants.owner)).filter(|_| runs) {
                    Some(first) => kinds[*first].1.join(answer),
                    None => {
                        if runs {
                            running.insert((&wants.pod.namespace, &wants.owner), kinds.len());
                        }
                        known.push(kinds.len());
                        kinds.push((wants, answer));
                    }
                }
            }
        }
    }
    kinds.into_iter().map(|(_, answer)| answer).collect()
}

/// Report whether the answer only says where the pod runs.
fn runs_well(wants: &Wants, answer: &Answer) -> bool {
    answer.state == PodState::Bound
        && wants.phase == "Running"
        && !wants.pod.deleting
        && !answer.shares.is_empty()
        && answer.notes.is_empty()
}
