//! Changes of JSON that keep it JSON, for annotations, lists of nodes, fields of a review, and JSON that is text inside of JSON.

use serde_json::{Map, Number, Value};

use super::{Chance, MOST};

/// Fields that Divvy reads and a seed may lack, with a valid value.
const FIELDS: [(&str, &str); 23] = [
    ("divvy.dev/gpu-model", "\"A100*,H100*,!T4\""),
    ("divvy.dev/gpu-memory", "\">=40Gi\""),
    ("divvy.dev/gpu-prefer", "\"most-memory\""),
    ("divvy.dev/gpu-uuid", "\"GPU-a1-4,GPU-a1-5\""),
    ("divvy.dev/gpus", "\"2\""),
    ("divvy.dev/gpu-vendor", "\"amd\""),
    ("divvy.dev/allocation", r#""{\"v\":1,\"gpus\":[],\"containers\":{}}""#),
    (
        "divvy.dev/inventory",
        r#""{\"v\":1,\"agent\":\"\",\"driver\":\"\",\"unitMiB\":1024,\"gpus\":[]}""#,
    ),
    ("ALIYUN_COM_GPU_MEM_IDX", "\"0\""),
    ("ALIYUN_COM_GPU_MEM_POD", "\"4\""),
    ("ALIYUN_COM_GPU_MEM_DEV", "\"16\""),
    ("scheduler.framework.gpushare.allocation", r#""{\"c\":{\"0\":4}}""#),
    ("aliyun.com/gpu-mem", "\"8\""),
    ("aliyun.com/gpu-count", "\"2\""),
    ("nominatedNodeName", "\"a1\""),
    ("nodeName", "\"a1\""),
    ("deletionTimestamp", "\"2026-01-01T00:00:00Z\""),
    ("priority", "1000"),
    ("restartPolicy", "\"Always\""),
    ("heldMiB", "1024"),
    ("health", "\"lost\""),
    ("links", r#"[["GPU-a1-1","nvlink",12]]"#),
    ("unschedulable", "true"),
];

/// Values at the limits of what a field can hold.
const EDGES: [&str; 14] = [
    "null",
    "true",
    "0",
    "-1",
    "1",
    "4294967296",
    "18446744073709551615",
    "-9223372036854775808",
    "1.5",
    "1e300",
    "\"\"",
    "\"0\"",
    "[]",
    "{}",
];

/// Change one place. JSON inside a text is changed as often as the text itself.
pub(super) fn change(chance: &mut Chance, value: &mut Value) {
    let other = place(value, chance.below(size(value))).map(|place| place.clone());
    let wanted = chance.below(size(value));
    let Some(place) = place(value, wanted) else { return };
    if let Value::String(text) = place
        && chance.below(2) == 0
        && let Ok(mut inner) = serde_json::from_str::<Value>(text)
        && (inner.is_object() || inner.is_array())
    {
        change(chance, &mut inner);
        *text = inner.to_string();
        return;
    }
    match (chance.below(8), &mut *place, other) {
        (0, _, _) => *place = parsed(EDGES[chance.below(EDGES.len())]),
        (1, _, Some(other)) if other.to_string().len() < MOST => *place = other,
        (_, Value::String(text), _) => change_text(chance, text),
        (_, Value::Array(list), _) => change_list(chance, list),
        (_, Value::Object(fields), _) => change_fields(chance, fields),
        (_, Value::Number(number), _) => change_number(chance, number),
        (_, Value::Bool(flag), _) => *flag = !*flag,
        (_, Value::Null, _) => *place = parsed(FIELDS[chance.below(FIELDS.len())].1),
    }
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect("a value of the tables is JSON")
}

/// Return the number of values in a value, including itself.
fn size(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(size).sum(),
        Value::Object(fields) => fields.values().map(size).sum(),
        _ => 0,
    }
}

/// Return the value with this number, counting the values in `value` as [`size`] does, from 0.
fn place(value: &mut Value, number: usize) -> Option<&mut Value> {
    let Some(mut left) = number.checked_sub(1) else {
        return Some(value);
    };
    let mut inner: Box<dyn Iterator<Item = &mut Value>> = match value {
        Value::Array(list) => Box::new(list.iter_mut()),
        Value::Object(fields) => Box::new(fields.values_mut()),
        _ => return None,
    };
    inner.find_map(|value| {
        let size = size(value);
        if left < size {
            place(value, left)
        } else {
            left -= size;
            None
        }
    })
}

fn change_text(chance: &mut Chance, text: &mut String) {
    let mut at = |text: &str| text.floor_char_boundary(chance.below(text.len() + 1));
    let (one, two) = (at(text), at(text));
    let (from, to) = (one.min(two), one.max(two));
    match chance.below(6) {
        0 => text.replace_range(from..to, ""),
        1 => text.insert_str(from, chance.word()),
        2 => {
            let piece = text[from..to].to_owned();
            text.insert_str(from, &piece);
        }
        // Many copies of one thing, separated as in the lists of annotations; they are compared with each GPU, or repeated for each node.
        3 => {
            let piece = format!("{},", &text[from..to]);
            let times = chance.below(MOST / piece.len());
            text.insert_str(from, &piece.repeat(times));
        }
        4 => {
            let piece = text[from..to].to_owned();
            let times = chance.below(MOST / piece.len().max(1));
            text.insert_str(from, &piece.repeat(times));
        }
        _ => {
            let number = parsed(EDGES[chance.below(EDGES.len())]).to_string();
            text.replace_range(from..to, &number);
        }
    }
}

fn change_list(chance: &mut Chance, list: &mut Vec<Value>) {
    let at = chance.below(list.len());
    match (chance.below(4), list.get(at).cloned()) {
        (_, None) => list.push(parsed(EDGES[chance.below(EDGES.len())])),
        (0, Some(_)) => drop(list.remove(at)),
        (1, Some(_)) => {
            let other = chance.below(list.len());
            list.swap(at, other);
        }
        (2, Some(item)) => list.push(item),
        (_, Some(item)) => {
            let most = (MOST / item.to_string().len().max(1)).min(200);
            list.extend(std::iter::repeat_n(item, chance.below(most)));
        }
    }
}

fn change_fields(chance: &mut Chance, fields: &mut Map<String, Value>) {
    let key = fields.keys().nth(chance.below(fields.len())).cloned();
    let known = FIELDS[chance.below(FIELDS.len())];
    match (chance.below(6), key) {
        (0, Some(key)) => drop(fields.remove(&key)),
        (1, Some(key)) => {
            let value = fields.remove(&key).unwrap_or_default();
            fields.insert(known.0.to_owned(), value);
        }
        (2, Some(key)) => {
            let value = fields.get(&key).cloned().unwrap_or_default();
            let most = (MOST / (value.to_string().len() + key.len()).max(1)).min(200);
            fields.extend((0..chance.below(most)).map(|number| (format!("{key}{number}"), value.clone())));
        }
        (3, Some(mut key)) => {
            let value = fields.remove(&key).unwrap_or_default();
            change_text(chance, &mut key);
            fields.insert(key, value);
        }
        _ => drop(fields.insert(known.0.to_owned(), parsed(known.1))),
    }
}

fn change_number(chance: &mut Chance, number: &mut Number) {
    let old = number.as_i64().unwrap_or(0);
    let new = match chance.below(5) {
        0 => old.wrapping_add(1),
        1 => old.wrapping_sub(1),
        2 => old.wrapping_mul(2),
        3 => old / 2,
        _ => 1 << chance.below(63),
    };
    *number = new.into();
}
