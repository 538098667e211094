//! What is on the pages.

use std::collections::BTreeSet;

use divvy_page::{ClusterScene, MessagePage, PageAddress, PartKey, SCRIPT, UsageHistory, listing, message, page, part};
use divvy_view::amounts;
use scraper::Html;

use crate::document::{ids, outline, select, text};
use crate::scenes::{everything, small};

const ALL: [&str; 7] = [
    "/",
    "/?namespace=vision",
    "/nodes/gpu-a100-01",
    "/nodes/gpu-h100-02",
    "/nodes/gpu-v100-01",
    "/pods/vision/legacy-tagger",
    "/waiting",
];

fn address(text: &str) -> PageAddress {
    PageAddress::parse(text).expect("an address")
}

fn hour(scene: &ClusterScene) -> UsageHistory {
    let mut history = UsageHistory::default();
    history.record(scene);
    history
}

fn open(scene: &ClusterScene, at: &str) -> Html {
    Html::parse_document(&page(scene, &hour(scene), &address(at), "v").expect("a page"))
}

#[test]
fn snapshots() {
    let scene = small();
    let history = hour(&scene);
    let show = |at: &str, key: PartKey| outline(&part(&scene, &history, &address(at), &key).expect("a part"));
    for node in ["gpu-a", "gpu-b", "gpu-c"] {
        insta::assert_snapshot!(format!("card-{node}"), show("/", PartKey::Node(node.to_owned())));
    }
    insta::assert_snapshot!("totals", show("/", PartKey::Totals));
    insta::assert_snapshot!("node", show("/nodes/gpu-a", PartKey::Node("gpu-a".to_owned())));
    insta::assert_snapshot!("pod", show("/pods/vision/tagger", PartKey::Node("gpu-a".to_owned())));
    let scene = everything();
    insta::assert_snapshot!(
        "waiting",
        outline(&part(&scene, &history, &PageAddress::Waiting, &PartKey::Waiting).expect("a part"))
    );
    let sign_in = message(&MessagePage {
        title: "Sign in".to_owned(),
        sentences: vec!["How.".to_owned()],
        sign_in: true,
    });
    insta::assert_snapshot!("message", outline(&sign_in));
}

#[test]
fn the_amounts_are_those_of_the_shared_module() {
    let scene = everything();
    let document = open(&scene, "/");
    let usage = |node: &str| scene.answers.get(node).and_then(|answer| answer.usage.as_ref().ok());
    let all = amounts::of_nodes(scene.view.nodes.iter().map(|node| (&**node, usage(&node.name))));
    let shown = text(&document, ".totals dd");
    for amount in [all.allocated, all.free, all.used.expect("measured")] {
        let expected = amounts::memory(amount).replace(".0 ", " ");
        assert!(shown.contains(&expected), "{expected}: {shown:?}");
    }
    assert!(shown.contains(&"on 11 of 12 nodes".to_owned()), "{shown:?}");
    for (node, card) in scene.view.nodes.iter().zip(text(&document, ".card header")) {
        let of = amounts::of_node(node, None);
        let total = amounts::memory(of.total).replace(".0 ", " ");
        assert!(card.starts_with(&node.name) && card.ends_with(&total), "{card}");
    }
}

#[test]
fn each_part_of_a_page_replaces_elements_that_the_page_has() {
    let scene = everything();
    let history = hour(&scene);
    for at in ALL {
        let on_page = ids(&open(&scene, at));
        let listing = listing(&scene, &address(at)).expect("a page");
        assert!(listing.keys.contains(&PartKey::Waiting));
        for key in listing.keys {
            let html = part(&scene, &history, &address(at), &key).expect("a part");
            let fragment = Html::parse_fragment(&html);
            let roots: Vec<_> = fragment
                .root_element()
                .child_elements()
                .map(|root| root.attr("id").map(str::to_owned))
                .collect();
            assert!(!roots.is_empty());
            for root in roots {
                assert!(root.as_ref().is_some_and(|id| on_page.contains(id)), "{at} {key:?}: {root:?}");
            }
            // What an event brings is what the page would have.
            let whole = page(&scene, &history, &address(at), "v").expect("a page");
            for root in fragment.root_element().child_elements() {
                let id = root.attr("id").expect("an id");
                let in_page = Html::parse_document(&whole);
                let same = select(&in_page, &format!("[id={id:?}]"));
                assert_eq!(same.first().map(|element| element.html()), Some(root.html()), "{at} {key:?}");
            }
        }
    }
}

#[test]
fn every_drawing_has_a_text_and_every_bar_a_table() {
    let scene = everything();
    for at in ALL {
        let document = open(&scene, at);
        for svg in select(&document, "svg") {
            let is_hidden = svg.attr("aria-hidden") == Some("true");
            let label = svg.attr("aria-label").filter(|_| svg.attr("role") == Some("img"));
            assert!(
                is_hidden || label.is_some_and(|label| label.len() > 10),
                "{at}: {}",
                svg.html()
            );
        }
        let all = select(&document, "[id]");
        assert_eq!(all.len(), ids(&document).len(), "{at}: an id appears twice");
        let bars = select(&document, "svg.bar").len();
        assert!(bars == 0 || !select(&document, "details table").is_empty(), "{at}");
        assert!(select(&document, "[style]").is_empty());
        assert_eq!(select(&document, "html[lang=en] main#main, a.skip[href='#main']").len(), 2);
    }
    let document = open(&scene, "/");
    assert_eq!(
        select(&document, ".card").len(),
        select(&document, ".card details table").len()
    );
}

#[test]
fn a_bar_has_the_widths_of_its_pods() {
    let scene = small();
    let document = open(&scene, "/nodes/gpu-a");
    let bars = select(&document, "svg.bar");
    let widths = |at: usize, selector: &str| -> Vec<(Option<&str>, Option<&str>)> {
        let selector = scraper::Selector::parse(selector).expect("a selector");
        bars[at]
            .select(&selector)
            .map(|rect| (rect.attr("x"), rect.attr("width")))
            .collect()
    };
    // 8 and 4 of 16 GiB; of the first, 6 GiB are used; the second one uses more than it has; 1 GiB is held by pods that have ended.
    assert_eq!(widths(0, ".share"), [(Some("0%"), Some("50%"))]);
    assert_eq!(
        widths(0, "rect[class^=n]"),
        [(Some("0%"), Some("37.5%")), (Some("50%"), Some("25%"))]
    );
    assert_eq!(widths(0, ".over"), [(Some("50%"), Some("25%"))]);
    assert_eq!(widths(0, ".held"), [(Some("75%"), Some("6.2%"))]);
    assert!(bars[1].attr("class").is_some_and(|class| class.contains("bad")));
}

#[test]
fn parts_of_a_divided_gpu_are_cells_of_one_bar() {
    let document = open(&everything(), "/nodes/gpu-h100-02");
    let bars = select(&document, "svg.bar");
    // Two whole GPUs, and two that are divided, into 7 and into 3 parts.
    let gap = scraper::Selector::parse(".gap").expect("a selector");
    let mut cells: Vec<usize> = bars.iter().map(|bar| bar.select(&gap).count() + 1).collect();
    cells.sort_unstable();
    assert_eq!(cells, [1, 1, 3, 7]);
}

/// The text of the bar also shows the usage of each MIG part.
#[test]
fn each_mig_parts_usage_is_in_the_table() {
    let mut scene = small();
    let shown = |scene: &ClusterScene| {
        let document = open(scene, "/nodes/gpu-b");
        let cells = |row: &scraper::ElementRef<'_>| {
            row.child_elements()
                .map(|cell| cell.text().collect())
                .collect::<Vec<String>>()
        };
        let rows: Vec<String> = select(&document, "tbody tr")
            .iter()
            .map(|row| cells(row).join(" | "))
            .collect();
        let label = select(&document, "svg.bar")[0].attr("aria-label").map(str::to_owned);
        (rows, label.expect("a text"), text(&document, ".facts"))
    };
    let (rows, label, facts) = shown(&scene);
    let expected = [
        "100 3g.40gb | no pods | 0 MiB | 450 MiB | 0 %",
        "101 3g.40gb, 1.4 GiB used, 5 % busy | ml/part | 10 GiB | 1 GiB | –",
    ];
    assert_eq!(rows, expected);
    for part in [
        "0 / 40 GiB allocated, 450 MiB used, 0 % busy, 0 pods",
        "1.4 GiB used, 5 % busy, ml/part 10 GiB (1 GiB used)",
    ] {
        assert!(label.contains(part), "{label}");
    }
    // Power, temperature, and clocks are those of the GPU that is divided.
    assert_eq!(facts.len(), 1);
    for fact in ["1.8 GiB used", "66 W", "31 °C", "1410 MHz"] {
        assert!(facts[0].contains(fact), "{facts:?}");
    }

    // Before Hopper, the driver does not measure how busy a MIG device is.
    let answer = scene.answers.get_mut("gpu-b").expect("an answer");
    for gpu in &mut answer.usage.as_mut().expect("measured").gpus {
        gpu.busy_percent = None;
    }
    let (rows, label, facts) = shown(&scene);
    let expected = [
        "100 3g.40gb | no pods | 0 MiB | 450 MiB | –",
        "101 3g.40gb, 1.4 GiB used, – busy | ml/part | 10 GiB | 1 GiB | –",
    ];
    assert_eq!(rows, expected);
    assert!(!label.contains("busy") && !facts[0].contains('%'), "{label} {facts:?}");
}

#[test]
fn what_was_not_measured_is_never_shown_as_0() {
    let mut scene = everything();
    scene.answers.clear();
    let document = open(&scene, "/nodes/gpu-a100-01");
    for row in select(&document, "tbody tr") {
        let cells: Vec<String> = row.child_elements().map(|cell| cell.text().collect()).collect();
        assert_eq!(cells[cells.len() - 2..], ["–", "–"], "{cells:?}");
    }
    let facts = text(&document, ".facts");
    assert!(
        facts
            .iter()
            .all(|facts| facts.ends_with("– used– busy") || facts.ends_with("– used – busy")),
        "{facts:?}"
    );
    assert!(select(&document, ".bar .share").is_empty());
}

#[test]
fn the_list_of_a_page_changes_with_its_parts_and_only_then() {
    let list = |scene: &ClusterScene, at: &str| listing(scene, &address(at)).map(|listing| listing.list);
    let scene = everything();
    let mut later = scene.clone();
    later.at += 60;
    later.answers.clear();
    later.waiting.clear();
    let mut fewer = scene.clone();
    fewer.view.nodes.retain(|node| node.name != "gpu-v100-01");
    for at in ALL {
        assert_eq!(list(&scene, at), list(&later, at), "{at}");
        let concerned = matches!(at, "/" | "/nodes/gpu-v100-01");
        assert_eq!(list(&scene, at) != list(&fewer, at), concerned, "{at}");
    }
    assert_ne!(list(&scene, "/?page=1"), list(&scene, "/?namespace=vision"));
    assert_eq!(list(&scene, "/pods/vision/nobody"), None);
    assert_eq!(list(&scene, "/nodes/nothing"), None);
}

#[test]
fn a_page_works_without_its_script() {
    let html = page(&everything(), &UsageHistory::default(), &address("/"), "v").expect("a page");
    assert!(html.contains(r#"<noscript><meta http-equiv="refresh" content="30"></noscript>"#));
    assert!(SCRIPT.len() < 10_000);
    let names: BTreeSet<&str> = [PartKey::Totals, PartKey::Waiting, PartKey::Node(String::new())]
        .iter()
        .map(PartKey::event)
        .collect();
    for name in names {
        assert!(SCRIPT.contains(&format!("'{name}'")), "the script knows the event {name}");
    }
}
