//! Texts of users and nodes never become markup.

use std::collections::BTreeSet;

use divvy_page::{ClusterScene, Filter, MessagePage, PageAddress, UsageHistory, message, page};
use divvy_view_sim::{HOSTILE, mixed};
use proptest::prelude::*;
use scraper::Html;

use crate::document::select;
use crate::scenes::everything;

/// The elements that the pages make.
const ELEMENTS: &[&str] = &[
    "html",
    "head",
    "meta",
    "title",
    "link",
    "noscript",
    "script",
    "body",
    "a",
    "header",
    "svg",
    "rect",
    "circle",
    "line",
    "path",
    "pattern",
    "defs",
    "nav",
    "ul",
    "ol",
    "li",
    "span",
    "p",
    "time",
    "main",
    "footer",
    "form",
    "button",
    "h1",
    "h2",
    "h3",
    "div",
    "dl",
    "dt",
    "dd",
    "label",
    "select",
    "option",
    "input",
    "section",
    "article",
    "details",
    "summary",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "strong",
    "figure",
    "figcaption",
];
/// Their attributes.
const ATTRIBUTES: &[&str] = &[
    "lang",
    "charset",
    "name",
    "content",
    "src",
    "defer",
    "rel",
    "href",
    "class",
    "id",
    "tabindex",
    "role",
    "width",
    "height",
    "viewBox",
    "aria-hidden",
    "aria-label",
    "aria-labelledby",
    "aria-current",
    "focusable",
    "x",
    "y",
    "x1",
    "x2",
    "y1",
    "y2",
    "d",
    "rx",
    "r",
    "cx",
    "cy",
    "fill",
    "patternUnits",
    "patternTransform",
    "preserveAspectRatio",
    "data-events",
    "data-since",
    "action",
    "method",
    "type",
    "value",
    "min",
    "max",
    "step",
    "inputmode",
    "placeholder",
    "selected",
    "title",
    "open",
    "scope",
    "rowspan",
    "autocomplete",
    "required",
];

/// Check that a document has only what the pages make.
fn check(html: &str) -> Result<(), TestCaseError> {
    let document = Html::parse_document(html);
    for element in select(&document, "*") {
        let name = element.value().name();
        prop_assert!(ELEMENTS.contains(&name), "<{name}>");
        for (attribute, value) in element.value().attrs() {
            prop_assert!(ATTRIBUTES.contains(&attribute), "<{name} {attribute}>");
            if ["href", "src", "action"].contains(&attribute) {
                let own = value.starts_with('/') && !value.starts_with("//");
                prop_assert!(own || value == "data:," || value == "#main", "{attribute}={value}");
            }
        }
        for child in element.children() {
            prop_assert!(!child.value().is_comment());
        }
    }
    let scripts: Vec<_> = select(&document, "script")
        .into_iter()
        .map(|script| (script.attr("src"), script.inner_html()))
        .collect();
    prop_assert!(
        scripts.is_empty() || scripts == [(Some("/script.js"), String::new())],
        "{scripts:?}"
    );
    // What a terminal or a browser would obey is visible.
    let orders = |c: char| (c.is_control() && c != '\n') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let text: String = document.root_element().text().collect();
    prop_assert!(!text.contains(orders), "{text:?}");
    Ok(())
}

/// Put a text wherever one from outside is.
fn with(scene: &mut ClusterScene, text: &str) {
    scene.notices.push(text.to_owned());
    for node in scene.view.nodes.iter_mut().map(std::sync::Arc::make_mut) {
        node.address = text.to_owned();
        node.driver_trouble = Some(text.to_owned());
        for gpu in &mut node.gpus {
            gpu.model = Some(text.to_owned());
            gpu.reason = Some(text.to_owned());
            gpu.message = Some(text.to_owned());
            if let Some(part) = &mut gpu.partition {
                part.profile = text.to_owned();
            }
            for pod in &mut gpu.pods {
                pod.namespace = text.to_owned();
                pod.name = text.to_owned();
                pod.uid = text.to_owned();
                pod.requested = Some(Box::new(divvy_view::Requested {
                    units: 1,
                    unit: text.to_owned(),
                }));
            }
        }
    }
    if let Some(node) = scene.view.nodes.first_mut().map(std::sync::Arc::make_mut) {
        node.name = text.to_owned();
    }
    scene.view.nodes.sort_by(|a, b| a.name.cmp(&b.name));
    for measured in scene.answers.values_mut() {
        match &mut measured.usage {
            Ok(usage) => {
                usage.gpus.iter_mut().for_each(|gpu| gpu.error = Some(text.to_owned()));
                for of in &mut usage.containers {
                    of.uid = text.to_owned();
                    of.container = Some(text.to_owned());
                }
            }
            Err(error) => *error = divvy_view::NoUsage::Other(text.to_owned()),
        }
    }
    for pod in &mut scene.waiting {
        pod.namespace = text.to_owned();
        pod.name = text.to_owned();
        pod.why = text.to_owned();
        pod.help = vec![text.to_owned()];
    }
}

fn all_pages(scene: &ClusterScene, text: &str) -> Vec<String> {
    let filter = Filter {
        namespace: Some(text.to_owned()),
        model: Some(text.to_owned()),
        ..Filter::default()
    };
    let mut history = UsageHistory::default();
    history.record(scene);
    let addresses = [
        PageAddress::Cluster(Filter::default()),
        PageAddress::Cluster(filter),
        PageAddress::Node(text.to_owned()),
        PageAddress::Node("gpu-h100-02".to_owned()),
        PageAddress::Pod {
            namespace: text.to_owned(),
            name: text.to_owned(),
        },
        PageAddress::Waiting,
    ];
    let open = |address: &PageAddress| page(scene, &history, address, text).unwrap_or_else(|| panic!("{address} exists"));
    addresses.iter().map(open).collect()
}

/// The lists of attributes have nothing unused either.
#[test]
fn the_lists_of_elements_have_nothing_unused() {
    let mut pages = Vec::new();
    let scene = everything();
    let mut history = UsageHistory::default();
    history.record(&scene);
    for address in [
        "/",
        "/?free=1&namespace=vision",
        "/nodes/gpu-h100-02",
        "/pods/vision/legacy-tagger",
        "/waiting",
    ] {
        let address = PageAddress::parse(address).expect("an address");
        pages.push(page(&scene, &history, &address, "v").expect("a page"));
    }
    pages.push(message(&MessagePage {
        sign_in: true,
        ..MessagePage::default()
    }));
    let documents: Vec<Html> = pages.iter().map(|page| Html::parse_document(page)).collect();
    let elements: Vec<_> = documents.iter().flat_map(|document| select(document, "*")).collect();
    let names: BTreeSet<&str> = elements.iter().map(|element| element.value().name()).collect();
    assert_eq!(names, ELEMENTS.iter().copied().collect());
    let attributes: BTreeSet<&str> = elements
        .iter()
        .flat_map(|element| element.value().attrs().map(|(name, _)| name))
        .collect();
    assert_eq!(attributes, ATTRIBUTES.iter().copied().collect());
}

#[test]
fn a_script_in_a_name_is_text() {
    let mut scene = everything();
    with(&mut scene, HOSTILE);
    for html in all_pages(&scene, HOSTILE) {
        check(&html).expect("only what the pages make");
        let document = Html::parse_document(&html);
        let shown: String = document.root_element().text().collect();
        assert!(shown.contains("\"><script>alert(1)</script>"), "{shown}");
    }
    check(&message(&MessagePage {
        title: HOSTILE.to_owned(),
        sentences: vec![HOSTILE.to_owned()],
        sign_in: true,
    }))
    .expect("text");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_text_becomes_markup(text in prop_oneof!["\\PC{1,40}", "[\"'<>&/=!a -]{1,40}", proptest::collection::vec(any::<char>(), 1..20).prop_map(|text| text.into_iter().collect())]) {
        let mut scene = ClusterScene { view: mixed(0).view, ..everything() };
        scene.view.nodes.retain(|node| ["gpu-h100-02", "gpu-a30-01", "gpu-v100-01"].contains(&node.name.as_str()));
        with(&mut scene, &text);
        for html in all_pages(&scene, &text) {
            check(&html)?;
        }
    }
}
