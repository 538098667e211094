//! Sets a field of an object, or removes it.

use serde_json::Value;

pub(crate) fn set_or_remove(object: &mut Value, field: &str, value: Value) {
    if let Value::Object(map) = object {
        if value.is_null() {
            map.shift_remove(field);
        } else {
            map.insert(field.to_owned(), value);
        }
    }
}
