use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::slim::{SlimNode, SlimPod};

/// The list as serde_json parses the whole text.
#[derive(Deserialize)]
struct Whole {
    /// Only its type matters: a kind that is not a text makes the list unreadable.
    #[serde(rename = "kind")]
    _kind: Option<String>,
    metadata: Option<ListMeta>,
    #[serde(default, deserialize_with = "present")]
    items: Option<Option<Vec<Value>>>,
}

/// Distinguishes `null` from an absent member.
fn present<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

type Outcome<T> = Result<(ListMeta, Vec<Result<T, UnreadableItem>>), Wrong>;

/// Parse the list in parts that end at these bytes.
fn read<T: DeserializeOwned + Send>(text: &[u8], cuts: &[usize]) -> Outcome<T> {
    let mut found = Vec::new();
    let meta = fed(text, cuts, &mut ParsingSink(&mut |item| found.push(item)))?;
    Ok((meta, found))
}

fn fed(text: &[u8], cuts: &[usize], sink: &mut dyn Sink) -> Result<ListMeta, Wrong> {
    let mut items = ListParser::new();
    let mut from = 0;
    for cut in cuts {
        let to = (*cut).clamp(from, text.len());
        // The stride is only for speed: parse after each part here.
        items.wait_for = 0;
        items.read(&text[from..to], sink)?;
        from = to;
    }
    items.read(&text[from..], sink)?;
    items.end(sink)
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e9..1e9f64).prop_map(Value::from),
        r#"[a-z{}\[\]",:\\ \n\u{0}é→😀]{0,12}"#.prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::vec((r#"[a-c{}"\\]{0,4}|metadata|items"#, inner), 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// Members in any order, some of them twice, with or without white space.
fn lists() -> impl Strategy<Value = String> {
    let member = prop_oneof![
        4 => proptest::collection::vec(values(), 0..6).prop_map(|items| ("items".to_owned(), Value::from(items))),
        1 => Just(("items".to_owned(), Value::Null)),
        1 => ("items|metadata|kind", values()),
        3 => ("[0-9]{0,3}", prop_oneof![Just(json!("")), Just(json!("next")), Just(Value::Null)])
            .prop_map(|(version, next)| ("metadata".to_owned(), json!({"resourceVersion": version, "continue": next, "remainingItemCount": 3}))),
        2 => Just(("kind".to_owned(), json!("PodList"))),
        2 => (r#"[a-z"\\]{1,4}"#, values()),
    ];
    let members = proptest::collection::vec((member, any::<bool>()), 0..5);
    (members, any::<bool>()).prop_map(|(members, pretty)| {
        let members: Vec<String> = members
            .into_iter()
            .map(|((name, value), escaped)| {
                let name = if escaped {
                    // Another spelling of the same name.
                    name.chars().map(|c| format!("\\u{:04x}", u32::from(c))).collect::<String>()
                } else {
                    Value::from(name).to_string().trim_matches('"').to_owned()
                };
                let value = if pretty { format!("{value:#}") } else { value.to_string() };
                if pretty {
                    format!("\n \"{name}\" :\t{value} ")
                } else {
                    format!("\"{name}\":{value}")
                }
            })
            .collect();
        format!("{{{}}}", members.join(","))
    })
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0..400usize, 0..12).prop_map(|mut cuts| {
        cuts.sort_unstable();
        cuts
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_list_in_parts_equals_serde_jsons_list(text in lists(), cuts in cuts(), broken in proptest::option::of((any::<prop::sample::Index>(), any::<u8>()))) {
        let mut text = text.into_bytes();
        if let Some((at, byte)) = broken {
            let at = at.index(text.len());
            // Change one byte, or end the text there.
            if byte < 40 { text.truncate(at) } else { text[at] = byte }
        }
        let whole = serde_json::from_slice::<Whole>(&text);
        let parts = read::<Value>(&text, &cuts);
        match (whole, parts) {
            (Ok(Whole { metadata, items: Some(items), .. }), Ok((meta, found))) => {
                let found: Vec<Value> = found.into_iter().map(|item| item.expect("any JSON is a Value")).collect();
                prop_assert_eq!(found, items.unwrap_or_default());
                prop_assert_eq!(meta, metadata.unwrap_or_default());
            }
            (Ok(Whole { items: None, .. }), Err(Wrong::NoList(_))) => {}
            (Err(_), Err(_)) => {}
            // A string that is not UTF-8, or a number that is too large: the other items are usable, and this one is reported.
            (Err(_), Ok((_, found))) => prop_assert!(found.iter().any(Result::is_err)),
            (Ok(_), parts) => prop_assert!(false, "{:?} of {}", parts, String::from_utf8_lossy(&text)),
        }
    }

    #[test]
    fn where_a_text_is_cut_into_parts_changes_nothing(text in lists(), one in cuts(), other in cuts()) {
        let (one, other) = (read::<SlimPod>(text.as_bytes(), &one), read::<SlimPod>(text.as_bytes(), &other));
        prop_assert_eq!(format!("{one:?}"), format!("{other:?}"));
    }
}

#[test]
fn every_byte_may_be_a_part_of_its_own() {
    let text = r#" {"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"7","continue":""},"items":[
        {"metadata":{"name":"a","annotations":{"x":"}],\"\\","divvy.dev/gpus":"2"}},"spec":{}},
        {"metadata":{"name":"b\u0062","labels":{"l":"\ud83d\ude00"}},"spec":{"containers":null},"status":null}], "more":[1,-2.5e3,true,null] } "#;
    let every: Vec<usize> = (0..=text.len()).collect();
    let (meta, items) = read::<SlimPod>(text.as_bytes(), &every).expect("a list");
    assert_eq!(meta.resource_version.as_deref(), Some("7"));
    let names: Vec<_> = items
        .into_iter()
        .map(|item| item.expect("readable").0.metadata.name)
        .collect();
    assert_eq!(names, [Some("a".to_owned()), Some("bb".to_owned())]);
}

#[test]
fn an_object_that_cannot_be_read_is_named_and_the_rest_is_read() {
    let cases = [
        (
            r#"{"metadata":{"name":"x","namespace":"ns"}}"#,
            "ns/x",
            "missing field `spec`",
        ),
        (
            r#"{"metadata":{"name":"x"},"spec":null}"#,
            "x",
            "invalid type: null, expected struct PodSpec",
        ),
        (
            r#"{"metadata":{"name":"x"},"spec":{"containers":[{"resources":{"limits":{"cpu":{}}}}]}}"#,
            "x",
            "expected a quantity",
        ),
        (
            r#"{"metadata":{"name":"x"},"spec":{"containers":[{"resources":{"limits":{"cpu":true}}}]}}"#,
            "x",
            "expected a quantity",
        ),
        (
            r#"{"metadata":{"name":"x"},"spec":{"priority":1e400}}"#,
            "x",
            "number out of range",
        ),
        (
            r#"{"metadata":{"name":"x"},"spec":{"containers":7}}"#,
            "x",
            "expected a sequence",
        ),
        (r#"{"spec":{"nodeName":"n"}}"#, "item 2", "missing field `metadata`"),
        (
            r#"{"metadata":{"name":5,"namespace":{}},"spec":{}}"#,
            "item 2",
            "invalid type: integer `5`",
        ),
        ("17", "item 2", "invalid type: integer `17`"),
        ("[[]]", "item 2", "invalid length 0"),
        ("null", "item 2", "invalid type: null"),
    ];
    let good = r#"{"metadata":{"name":"good"},"spec":{}}"#;
    for (bad, name, why) in cases {
        let text = format!(r#"{{"items":[{good},{bad},{good}],"metadata":{{"resourceVersion":"1"}}}}"#);
        for cuts in [vec![], (0..text.len()).collect()] {
            let (_, items) = read::<SlimPod>(text.as_bytes(), &cuts).expect("a list");
            let wrong: Vec<_> = items.iter().filter_map(|item| item.as_ref().err()).collect();
            assert_eq!((items.len(), wrong.len()), (3, 1), "{bad}");
            assert_eq!(wrong[0].name, name, "{bad}");
            assert!(
                wrong[0].why.contains(why) && !wrong[0].why.contains("column"),
                "{bad}: {}",
                wrong[0].why
            );
        }
    }
}

#[test]
fn what_is_no_list_is_said_in_a_sentence() {
    let cases: [(&str, &str); 14] = [
        ("", "the answer is not a list: it is empty"),
        ("{", "the answer ended after 1 bytes, in the middle of the list"),
        (
            r#"{"items":[{"metadata":{"#,
            "the answer ended after 23 bytes, in the middle of the list",
        ),
        (r#"{"items":[]"#, "the answer ended after 11 bytes, in the middle of the list"),
        (
            "<html><body>502 Bad Gateway</body></html>",
            "the answer is not JSON: expected value (byte 0)",
        ),
        (
            r#"{"kind":"Status","code":500}"#,
            "it is an object of kind \"Status\" without items",
        ),
        ("{}", "it is an object without items"),
        ("[]", "the answer is not a list: an object was expected"),
        ("3", "the answer is not a list: an object was expected"),
        (
            r#"{"items":{}}"#,
            "the answer is not JSON: invalid type: map, expected a sequence",
        ),
        (r#"{"items":[],"items":[]}"#, "it has two members \"items\""),
        (r#"{"items":[1,]}"#, "the answer is not JSON: expected value (byte 12)"),
        (r#"{"items":[]}{}"#, "there is more text after the list (byte 12)"),
        (
            r#"{"items":[] "metadata":{}}"#,
            "a comma or the end of the object was expected (byte 12)",
        ),
    ];
    for (text, expected) in cases {
        let wrong = read::<SlimNode>(text.as_bytes(), &[1, 9]).expect_err("no list").to_string();
        assert!(wrong.contains(expected), "{text}: {wrong}");
    }
}

#[test]
fn only_items_above_the_size_limit_are_refused() {
    let list = |size: usize| {
        format!(
            r#"{{"items":[{{"metadata":{{"name":"{}"}},"spec":{{}}}}]}}"#,
            "x".repeat(size)
        )
    };
    let parts = |text: &str| {
        let mut items = ListParser::new();
        let mut found = Vec::new();
        let mut take = |item: Result<SlimNode, UnreadableItem>| found.push(item.is_ok());
        let mut take = ParsingSink(&mut take);
        for part in text.as_bytes().chunks(100_000) {
            items.read(part, &mut take)?;
            assert!(
                items.buffer.len() <= LARGEST + 100_000,
                "no more is held than one item and a part"
            );
        }
        items.end(&mut take)?;
        Ok::<_, Wrong>(found)
    };
    assert_eq!(parts(&list(LARGEST - 1000)), Ok(vec![true]));
    let wrong = parts(&list(LARGEST + 1)).expect_err("too large");
    assert_eq!(wrong, Wrong::TooLarge { number: 1 });
    assert_eq!(
        read::<SlimNode>(list(LARGEST + 1).as_bytes(), &[]).err(),
        Some(Wrong::TooLarge { number: 1 })
    );
    assert_eq!(
        wrong.to_string(),
        "item 1 of the list is larger than 16 MiB, but no object of an API server is that large"
    );
}

#[test]
fn of_a_list_in_parts_no_more_is_held_than_an_item_and_a_part() {
    let item = r#"{"metadata":{"name":"a","labels":{"l":"{\"\\"}},"spec":{"containers":[{"name":"c"}]}}"#;
    let text = format!(r#"{{"items":[{}]}}"#, vec![item; 50_000].join(","));
    let mut items = ListParser::new();
    let mut count = 0;
    let mut take = |item: Result<SlimPod, UnreadableItem>| count += usize::from(item.is_ok());
    let mut take = ParsingSink(&mut take);
    for part in text.as_bytes().chunks(8192) {
        items.read(part, &mut take).expect("a part");
        assert!(items.buffer.len() <= STRIDE + 8192 + item.len(), "{}", items.buffer.len());
    }
    items.end(&mut take).expect("the end");
    assert_eq!(count, 50_000);
}
