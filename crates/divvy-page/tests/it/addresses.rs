//! Addresses, and which nodes they select.

use divvy_page::{ConditionFilter, Filter, NoAddress, PageAddress, listing, page};
use divvy_page::{PartKey, UsageHistory};
use divvy_view_sim::{equal, mixed};
use proptest::prelude::*;
use scraper::Html;

use crate::document::{select, text};
use crate::scenes::scene;

#[test]
fn what_is_no_address_is_refused() {
    for text in [
        "",
        "/nodes",
        "/nodes/",
        "/nodes/a/b",
        "/pods/a",
        "/pods//a",
        "/waiting/x",
        "nodes/a",
        "/nodes/%ff",
        "/login",
    ] {
        assert_eq!(PageAddress::parse(text), Err(NoAddress::Unknown), "{text}");
    }
    assert_eq!(
        PageAddress::parse(&format!("/nodes/{}", "a".repeat(5000))),
        Err(NoAddress::Unknown)
    );
    for text in [
        format!("/nodes/{}", "a".repeat(257)),
        format!("/pods/{}/a", "%0A".repeat(257)),
    ] {
        assert_eq!(PageAddress::parse(&text), Err(NoAddress::Unknown));
    }
    let long = "a".repeat(257);
    for (text, says) in [
        (&*format!("/?namespace={long}"), "namespace has 257 bytes"),
        (&*format!("/?model={long}"), "no model has more than 256"),
        ("/?free=many", "free=\"many\" is not a whole number"),
        ("/?page=-1", "page=\"-1\" is not a whole number"),
        ("/?free=99999999999", "is not a whole number"),
        ("/?health=fine", "neither ok nor problem"),
    ] {
        let Err(NoAddress::Wrong(why)) = PageAddress::parse(text) else {
            panic!("{text} was read")
        };
        assert!(why.contains(says), "{why}");
    }
    // A form sends fields that are empty.
    assert_eq!(
        PageAddress::parse("/?namespace=&model=&free=&health="),
        Ok(PageAddress::Cluster(Filter::default()))
    );
}

#[test]
fn a_filter_selects_the_nodes_that_are_as_it_says() {
    let scene = scene(mixed(0));
    let nodes = |query: &str| -> Vec<String> {
        let address = PageAddress::parse(query).expect("an address");
        let keys = listing(&scene, &address).expect("a page").keys.into_iter();
        keys.filter_map(|key| if let PartKey::Node(name) = key { Some(name) } else { None })
            .collect()
    };
    for (query, expected) in [
        ("/?model=NVIDIA+A30", vec!["gpu-a30-01"]),
        ("/?health=problem", vec!["gpu-a30-01", "gpu-l40s-01"]),
        ("/?namespace=genomics", vec!["gpu-v100-01"]),
        ("/?free=100", vec!["gpu-h200-01"]),
        // One GPU must be as the filter says: no L4 has 25 GiB.
        ("/?model=NVIDIA+L4&free=25", vec![]),
        ("/?model=NVIDIA+L4&free=24", vec!["gpu-l4-02", "gpu-l4-03"]),
        ("/?namespace=genomics&health=problem", vec![]),
    ] {
        assert_eq!(nodes(query), expected, "{query}");
    }
    assert_eq!(nodes("/?health=ok").len() + nodes("/?health=problem").len(), nodes("/").len());
}

/// The links lead to the other nodes with the same filter.
#[test]
fn a_page_has_100_nodes_and_further_links() {
    let scene = scene(equal(250, 3, 0));
    let open = |address: &str| {
        let address = PageAddress::parse(address).expect("an address");
        Html::parse_document(&page(&scene, &UsageHistory::default(), &address, "v").expect("a page"))
    };
    let mut seen = Vec::new();
    let mut address = "/?namespace=vision".to_owned();
    for expected in [100, 100, 50] {
        let document = open(&address);
        let names = text(&document, ".card h3");
        assert_eq!(names.len(), expected);
        seen.extend(names);
        if let Some(next) = select(&document, "a[rel=next]").first() {
            address = next.attr("href").expect("an address").to_owned();
            assert!(address.contains("namespace=vision"), "{address}");
        }
    }
    let all: Vec<String> = (0..250).map(|number| format!("gpu-{number:04}")).collect();
    assert_eq!(seen, all);
    assert!(select(&open(&address), "a[rel=next]").is_empty());
    // After the last page comes the last page.
    assert_eq!(text(&open("/?page=99"), ".pager span"), ["Page 3 of 3"]);
}

proptest! {
    #[test]
    fn an_address_is_read_as_it_was_written(
        name in "\\PC{1,20}", namespace in "[^/]{1,20}", free in any::<Option<u32>>(), page in 0..1000_usize,
        health in proptest::option::of(prop_oneof![Just(ConditionFilter::Ok), Just(ConditionFilter::Problem)]), model in proptest::option::of("\\PC{1,30}"),
    ) {
        let filter = Filter { namespace: Some(namespace.clone()), model, free: free.map(u64::from), health, page };
        for address in [PageAddress::Cluster(filter), PageAddress::Node(name.clone()), PageAddress::Pod { namespace, name }, PageAddress::Waiting] {
            let text = address.to_string();
            prop_assert!(text.is_ascii());
            prop_assert_eq!(PageAddress::parse(&text), Ok(address), "{}", text);
        }
    }
}
