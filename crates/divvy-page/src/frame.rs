//! What all pages have in common: the head, the navigation, the footer.

use maud::{DOCTYPE, Markup, html};

use crate::text::{shown, time};
use crate::{ClusterScene, Filter, PageAddress, bar, waiting};

/// The style sheet of all pages.
pub const STYLE: &str = include_str!("style.css");
/// The script of all pages. It applies the events of a stream; the pages are complete without it.
pub const SCRIPT: &str = include_str!("script.js");

/// The stream of events of a page.
pub(crate) struct PageStream {
    /// The stream's address.
    pub(crate) address: String,
    /// The version of what the page shows.
    pub(crate) since: String,
}

/// Return a page.
pub(crate) fn page(scene: &ClusterScene, address: &PageAddress, title: &str, stream: &PageStream, main: &Markup) -> String {
    let current = |of: bool| of.then_some("page");
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                (head(title))
                noscript { meta http-equiv="refresh" content="30"; }
                script src="/script.js" defer {}
            }
            body data-events=(stream.address) data-since=(stream.since) {
                a.skip href="#main" { "Skip to the content" }
                header.top {
                    a.brand href="/" { (logo()) "Divvy" }
                    nav aria-label="Pages" {
                        ul {
                            li { a href="/" aria-current=[current(matches!(address, PageAddress::Cluster(_)))] { "Cluster" } }
                            li { a href="/waiting" aria-current=[current(*address == PageAddress::Waiting)] { "Waiting " (waiting::count(scene)) } }
                        }
                    }
                    p.state { span id="status" role="status" {} time.read { "As of " (time(scene.at)) } }
                }
                (bar::patterns())
                main id="main" tabindex="-1" { (main) }
                footer {
                    p { "Memory that is allocated comes from the API server; what is used, from the agents of the nodes on this page." }
                    form action="/logout" method="post" { button.plain { "Sign out" } }
                }
            }
        }
    };
    markup.into_string()
}

fn head(title: &str) -> Markup {
    html! {
        meta charset="utf-8";
        meta name="viewport" content="width=device-width, initial-scale=1";
        meta name="color-scheme" content="light dark";
        title { (title) " · Divvy" }
        link rel="icon" href="data:,";
        link rel="stylesheet" href="/style.css";
    }
}

fn logo() -> Markup {
    html! {
        svg.logo width="20" height="20" viewBox="0 0 20 20" aria-hidden="true" focusable="false" {
            rect.a x="1" y="3" width="9" height="14" rx="2" {}
            rect.b x="11" y="3" width="4" height="14" rx="1.5" {}
            rect.c x="16" y="3" width="3" height="14" rx="1.5" {}
        }
    }
}

/// A page that only says something: a refusal, an error, or the form for the token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessagePage {
    /// The heading.
    pub title: String,
    /// The sentences below it.
    pub sentences: Vec<String>,
    /// Whether the form for the token follows.
    pub sign_in: bool,
}

/// Return the page with a message.
pub fn message(message: &MessagePage) -> String {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head { (head(&shown(&message.title))) }
            body.message {
                header.top { a.brand href="/" { (logo()) "Divvy" } }
                main id="main" {
                    h1 { (shown(&message.title)) }
                    @for sentence in &message.sentences { p { (shown(sentence)) } }
                    @if message.sign_in {
                        form.sign-in action="/login" method="post" {
                            label { "Token" input type="password" name="token" autocomplete="current-password" required; }
                            button { "Sign in" }
                        }
                    }
                }
            }
        }
    };
    markup.into_string()
}

/// Return the title of a page.
pub(crate) fn title(address: &PageAddress) -> String {
    match address {
        PageAddress::Cluster(filter) if *filter == Filter::default() => "GPUs".to_owned(),
        PageAddress::Cluster(filter) => format!("GPUs, page {}", filter.page + 1),
        PageAddress::Node(name) => shown(name),
        PageAddress::Pod { namespace, name } => shown(&format!("{namespace}/{name}")),
        PageAddress::Waiting => "Waiting pods".to_owned(),
    }
}
