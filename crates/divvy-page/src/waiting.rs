//! The page of the pods that wait.

use maud::{Markup, html};

use crate::ClusterScene;
use crate::text::{counted, shown, span};

/// The maximum number of pods on the page.
const SHOWN: usize = 200;

pub(crate) fn page(scene: &ClusterScene) -> Markup {
    html! {
        h1 { "Pods that wait for GPUs" }
        (list(scene))
    }
}

/// The number of pods, for the navigation.
pub(crate) fn count(scene: &ClusterScene) -> Markup {
    html! { span.count id="waiting-count" { (scene.waiting.len()) } }
}

pub(crate) fn list(scene: &ClusterScene) -> Markup {
    let rest = scene.waiting.len().saturating_sub(SHOWN);
    html! {
        div id="waiting" {
            @if scene.waiting.is_empty() { p.empty { "No pod waits for a GPU." } }
            @for pod in scene.waiting.iter().take(SHOWN) {
                article.card.pod {
                    header {
                        h2 { span.faint { (shown(&pod.namespace)) "/" } (shown(&pod.name)) }
                        @if let Some(seconds) = pod.seconds { p.sum { "for " (span(seconds)) } }
                    }
                    p { (shown(&pod.why)) }
                    @if !pod.help.is_empty() {
                        h3 { "What would help" }
                        ol { @for help in &pod.help { li { (shown(help)) } } }
                    }
                }
            }
            @if rest > 0 { p.note { "And " (counted(rest, "more pod")) ". `kubectl divvy top` shows all of them." } }
        }
    }
}
