//! The verbs on objects: create, update, patch, delete, and bind, each as one transaction (apiserver `pkg/registry/generic`).

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::clock::Clock;
use super::error::{ApiError, FieldError};
use super::ownership::{self, Writer};
use super::resources::{RequestTarget, ServedResource, ServedResources};
use super::selector::ListSelector;
use super::set_or_remove::set_or_remove;
use super::store::{ApiStore, ObjectKey, StoreContent};
use super::{checks, events, patch, pods};

/// The store behind the API's rules.
#[derive(Debug)]
pub(crate) struct ApiRegistry {
    pub(crate) store: ApiStore,
    pub(crate) resources: ServedResources,
    pub(crate) clock: Clock,
}

/// The content type of a PATCH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchKind {
    /// `application/merge-patch+json`
    Merge,
    /// `application/strategic-merge-patch+json`
    Strategic,
    /// `application/json-patch+json`
    Json,
    /// `application/apply-patch+yaml` (JSON only): a strategic merge that creates an absent object. Labels have field managers; other
    /// fields that an applier omits are kept.
    Apply,
}

/// The fields of `DeleteOptions` that the server evaluates.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeleteOptions {
    /// The grace period in seconds; 0 removes the object immediately.
    pub grace_period_s: Option<i64>,
    /// The uid that the object must have, as a precondition.
    pub uid: Option<String>,
    /// The version that the object must have, as a precondition.
    pub resource_version: Option<String>,
}

/// The result of a deletion.
#[derive(Debug, Clone)]
pub enum Deleted {
    /// The object is gone. The value is its last state.
    Gone(Arc<Value>),
    /// The object remains until its kubelet reports its end or until its finalizers are removed.
    Pending(Arc<Value>),
}

/// The options of a write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WriteOptions {
    /// Whether to check the write without storing anything.
    pub(crate) dry_run: bool,
    /// `fieldValidation=Strict`: whether unknown fields are refused instead of dropped.
    pub(crate) strict: bool,
    /// The field manager.
    pub(crate) manager: String,
    /// Whether an apply takes over fields of other managers.
    pub(crate) force: bool,
}

const STALE: &str = "the object has been modified; please apply your changes to the latest version and try again";

fn priority_class(inner: &StoreContent, name: &str) -> Option<pods::PriorityClass> {
    let key = (String::new(), name.to_owned());
    let Some(class) = inner.get("priorityclasses.scheduling.k8s.io", &key) else {
        return pods::built_in_class(name);
    };
    let policy = class["preemptionPolicy"].as_str().unwrap_or("PreemptLowerPriority");
    Some((class["value"].as_i64().unwrap_or(0), policy.to_owned()))
}

impl ApiRegistry {
    pub(crate) fn create(&self, target: &RequestTarget, mut body: Value, options: &WriteOptions) -> Result<Arc<Value>, ApiError> {
        let resource = &*target.resource;
        self.check_body(resource, &mut body, options.strict)?;
        if !target.name.is_empty() {
            return Err(ApiError::method_not_allowed());
        }
        checks::place_in_namespace(target, &mut body)?;
        let name = body["metadata"]["name"].as_str().unwrap_or("").to_owned();
        let generate = body["metadata"]["generateName"].as_str().unwrap_or("").to_owned();
        self.store.write(|inner| {
            let name = match (name.as_str(), generate.as_str()) {
                ("", "") => {
                    let why = [FieldError::required("metadata.name", "name or generateName is required")];
                    return Err(ApiError::invalid(&resource.group, &resource.kind, "", &why));
                }
                ("", prefix) => format!("{prefix}{}", suffix(inner.next_random())),
                (name, _) => name.to_owned(),
            };
            body["metadata"]["name"] = name.clone().into();
            checks::name(resource, &name)?;
            checks::namespace(inner, resource, &target.namespace)?;
            let key = (target.namespace.clone(), name);
            if inner.get(&resource.storage(), &key).is_some() {
                return Err(ApiError::already_exists(&resource.qualified(), &key.1));
            }
            let object = self.fresh(inner, resource, body)?;
            Ok(commit(inner, resource, object, options.dry_run))
        })
    }

    /// Set those fields of a new object that the server determines.
    fn fresh(&self, inner: &mut StoreContent, resource: &ServedResource, mut object: Value) -> Result<Value, ApiError> {
        let metadata = &mut object["metadata"];
        let uid = inner.next_uid();
        if let Value::Object(map) = metadata {
            for field in [
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
                "managedFields",
                "selfLink",
                "resourceVersion",
            ] {
                map.shift_remove(field);
            }
            map.insert("uid".into(), uid.into());
            map.insert("creationTimestamp".into(), self.clock.timestamp().into());
        }
        if resource.is_core("pods") {
            pods::admit_priority(&mut object, |name| priority_class(inner, name))?;
            pods::set_defaults(&mut object);
            pods::check_quantities(&object)?;
            let errors = pods::validate(&object);
            if !errors.is_empty() {
                let name = object["metadata"]["name"].as_str().unwrap_or("");
                return Err(ApiError::invalid("", "Pod", name, &errors));
            }
        } else if resource.is_core("namespaces") {
            object["spec"] = json!({"finalizers": ["kubernetes"]});
            object["status"] = json!({"phase": "Active"});
            checks::name_as_label(&mut object);
        } else if resource.is_core("nodes") {
            // A kubelet registers its node with the status in the same request.
            checks::node_quantities(&mut object);
        } else if resource.status
            && let Value::Object(map) = &mut object
        {
            map.shift_remove("status");
        }
        Ok(object)
    }

    /// Handle PUT. The result's boolean is true if the object was created.
    pub(crate) fn update(
        &self,
        target: &RequestTarget,
        mut body: Value,
        options: &WriteOptions,
    ) -> Result<(Arc<Value>, bool), ApiError> {
        let resource = &*target.resource;
        self.check_body(resource, &mut body, options.strict)?;
        let body_name = body["metadata"]["name"].as_str().unwrap_or("");
        if body_name != target.name {
            return Err(ApiError::bad_request(format!(
                "the name of the object ({body_name}) does not match the name on the URL ({})",
                target.name
            )));
        }
        checks::place_in_namespace(target, &mut body)?;
        self.store.write(|inner| {
            let key = (target.namespace.clone(), target.name.clone());
            match inner.get(&resource.storage(), &key) {
                Some(existing) => Ok((self.replace(inner, target, &existing, body, options, None)?, false)),
                None if resource.create_on_update && target.subresource.is_empty() => {
                    checks::namespace(inner, resource, &target.namespace)?;
                    let object = self.fresh(inner, resource, body)?;
                    Ok((commit(inner, resource, object, options.dry_run), true))
                }
                None => Err(ApiError::not_found(&resource.qualified(), &target.name)),
            }
        })
    }

    /// Handle PATCH. The result's boolean is true if the object was created, which only apply does.
    pub(crate) fn patch(
        &self,
        target: &RequestTarget,
        kind: PatchKind,
        body: &Value,
        options: &WriteOptions,
    ) -> Result<(Arc<Value>, bool), ApiError> {
        let resource = &*target.resource;
        let (time, version) = (self.clock.timestamp(), resource.api_version());
        let writer = Writer {
            manager: &options.manager,
            time: &time,
            version: &version,
        };
        self.store.write(|inner| {
            let key = (target.namespace.clone(), target.name.clone());
            let Some(existing) = inner.get(&resource.storage(), &key) else {
                if kind != PatchKind::Apply || !target.subresource.is_empty() {
                    return Err(ApiError::not_found(&resource.qualified(), &target.name));
                }
                if let Some(uid) = body["metadata"]["uid"].as_str().filter(|uid| !uid.is_empty()) {
                    let why = format!("uid mismatch: the provided object specified uid {uid}, and no existing object was found");
                    return Err(ApiError::conflict(&resource.qualified(), &target.name, &why));
                }
                let mut object = Value::Object(Map::new());
                patch::strategic(&mut object, body)?;
                self.check_body(resource, &mut object, options.strict)?;
                checks::place_in_namespace(target, &mut object)?;
                object["metadata"]["name"] = target.name.clone().into();
                checks::name(resource, &target.name)?;
                checks::namespace(inner, resource, &target.namespace)?;
                let mut object = self.fresh(inner, resource, object)?;
                let managed = ownership::after_apply(&Value::Null, body, writer);
                set_or_remove(&mut object["metadata"], "managedFields", managed);
                return Ok((commit(inner, resource, object, options.dry_run), true));
            };
            // The patch applies to the view of the object that its writer sees.
            let mut object = events::to_view(resource, &existing).into_owned();
            match kind {
                PatchKind::Merge => json_patch::merge(&mut object, body),
                PatchKind::Strategic => patch::strategic(&mut object, body)?,
                PatchKind::Apply => {
                    patch::strategic(&mut object, body)?;
                    ownership::apply(&existing, body, &mut object, writer, options.force)?;
                }
                PatchKind::Json => patch::json_patch(&mut object, body)?,
            }
            if object["metadata"]["name"] != existing["metadata"]["name"] {
                return Err(ApiError::bad_request(format!(
                    "the name of the object ({}) does not match the name on the URL ({})",
                    object["metadata"]["name"].as_str().unwrap_or(""),
                    target.name
                )));
            }
            self.check_body(resource, &mut object, options.strict)?;
            checks::place_in_namespace(target, &mut object)?;
            let applied = (kind == PatchKind::Apply).then_some(body);
            Ok((self.replace(inner, target, &existing, object, options, applied)?, false))
        })
    }

    /// Finish a PUT or PATCH: preconditions, immutable fields, validation, and the commit. `applied` is the body of an apply.
    fn replace(
        &self,
        inner: &mut StoreContent,
        target: &RequestTarget,
        existing: &Arc<Value>,
        mut new: Value,
        options: &WriteOptions,
        applied: Option<&Value>,
    ) -> Result<Arc<Value>, ApiError> {
        let resource = &*target.resource;
        let name = target.name.as_str();
        let uid = new["metadata"]["uid"].as_str().unwrap_or("");
        if !uid.is_empty() && new["metadata"]["uid"] != existing["metadata"]["uid"] {
            return Err(precondition_failed(
                resource,
                target,
                "UID",
                uid,
                &existing["metadata"]["uid"],
            ));
        }
        let version = new["metadata"]["resourceVersion"].as_str().unwrap_or("");
        if version.is_empty() && resource.group == "coordination.k8s.io" {
            let why = [FieldError::invalid(
                "metadata.resourceVersion",
                &json!(0),
                "must be specified for an update",
            )];
            return Err(ApiError::invalid(&resource.group, &resource.kind, name, &why));
        }
        if !version.is_empty() && new["metadata"]["resourceVersion"] != existing["metadata"]["resourceVersion"] {
            return Err(ApiError::conflict(&resource.qualified(), name, STALE));
        }
        if target.subresource == "status" {
            // Outside the status, only metadata changes (labels, annotations), as in the built-in status strategies.
            let mut whole = (**existing).clone();
            let owners = existing["metadata"]["ownerReferences"].clone();
            whole["metadata"] = new["metadata"].take();
            whole["status"] = new["status"].take();
            if whole["status"].is_null() {
                whole["status"] = json!({});
            }
            set_or_remove(&mut whole["metadata"], "ownerReferences", owners);
            new = whole;
        } else if resource.status {
            set_or_remove(&mut new, "status", existing["status"].clone());
        }
        for field in [
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "namespace",
            "resourceVersion",
        ] {
            set_or_remove(&mut new["metadata"], field, existing["metadata"][field].clone());
        }
        let (time, version) = (self.clock.timestamp(), resource.api_version());
        let writer = Writer {
            manager: &options.manager,
            time: &time,
            version: &version,
        };
        let managed = match applied {
            Some(body) => ownership::after_apply(existing, body, writer),
            None => ownership::after_update(existing, &new, writer),
        };
        set_or_remove(&mut new["metadata"], "managedFields", managed);
        if resource.is_core("pods") {
            pods::normalise_quantities(&mut new);
            let errors = pods::validate_update(existing, &new);
            if !errors.is_empty() {
                return Err(ApiError::invalid("", "Pod", name, &errors));
            }
        } else if resource.is_core("nodes") {
            checks::node_quantities(&mut new);
        } else if resource.is_core("namespaces") {
            checks::name_as_label(&mut new);
        }
        // An update that changes nothing is not committed: no revision, no event (etcd3 store, GuaranteedUpdate).
        if new == **existing {
            return Ok(existing.clone());
        }
        Ok(commit(inner, resource, new, options.dry_run))
    }

    pub(crate) fn delete(&self, target: &RequestTarget, options: &DeleteOptions, dry_run: bool) -> Result<Deleted, ApiError> {
        self.store.write(|inner| self.delete_in(inner, target, options, dry_run))
    }

    /// Delete an object as `Store.Delete` and `rest.BeforeDelete` do.
    fn delete_in(
        &self,
        inner: &mut StoreContent,
        target: &RequestTarget,
        options: &DeleteOptions,
        dry_run: bool,
    ) -> Result<Deleted, ApiError> {
        let resource = &*target.resource;
        let key = (target.namespace.clone(), target.name.clone());
        let existing = inner
            .get(&resource.storage(), &key)
            .ok_or_else(|| ApiError::not_found(&resource.qualified(), &target.name))?;
        let metadata = &existing["metadata"];
        if let Some(uid) = options.uid.as_deref().filter(|uid| metadata["uid"] != **uid) {
            let why = format!(
                "the UID in the precondition ({uid}) does not match the UID in record ({}). The object might have been deleted and then recreated",
                metadata["uid"].as_str().unwrap_or("")
            );
            return Err(ApiError::conflict(&resource.qualified(), &target.name, &why));
        }
        if let Some(version) = options
            .resource_version
            .as_deref()
            .filter(|v| metadata["resourceVersion"] != **v)
        {
            let why = format!(
                "the ResourceVersion in the precondition ({version}) does not match the ResourceVersion in record ({}). The object might have been modified",
                metadata["resourceVersion"].as_str().unwrap_or("")
            );
            return Err(ApiError::conflict(&resource.qualified(), &target.name, &why));
        }
        if resource.is_core("namespaces") {
            return self.delete_namespace(inner, &existing, dry_run);
        }
        let grace = if resource.is_core("pods") {
            match metadata["deletionGracePeriodSeconds"].as_i64() {
                // The deletion has already begun: its grace period can become shorter, but not longer.
                Some(running) => match options.grace_period_s {
                    Some(asked) if asked < running => asked.max(0),
                    _ => return Ok(Deleted::Pending(existing)),
                },
                None => pods::grace_period_s(&existing, options.grace_period_s),
            }
        } else {
            0
        };
        if !resource.is_core("pods") {
            return Ok(Deleted::Gone(if dry_run {
                existing
            } else {
                forget(inner, resource, &key).unwrap_or(existing)
            }));
        }
        // Watchers see a pod with a grace period of zero before it is removed, because upstream commits that state.
        let mut marked = (*existing).clone();
        let since = metadata["deletionTimestamp"]
            .as_str()
            .map_or(0, |_| metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0));
        let stamp = match metadata["deletionTimestamp"].as_str() {
            Some(set) => self.clock.shifted(set, grace - since),
            None => self.clock.timestamp_in(grace),
        };
        marked["metadata"]["deletionTimestamp"] = stamp.into();
        marked["metadata"]["deletionGracePeriodSeconds"] = grace.into();
        let marked = commit(inner, resource, marked, dry_run);
        if grace > 0 {
            return Ok(Deleted::Pending(marked));
        }
        Ok(Deleted::Gone(if dry_run {
            marked
        } else {
            forget(inner, resource, &key).unwrap_or(marked)
        }))
    }

    /// Delete a namespace: do at once what the namespace controller does over time. The namespace remains Terminating while its
    /// pods end.
    fn delete_namespace(&self, inner: &mut StoreContent, existing: &Arc<Value>, dry_run: bool) -> Result<Deleted, ApiError> {
        let name = existing["metadata"]["name"].as_str().unwrap_or("").to_owned();
        if matches!(name.as_str(), "default" | "kube-system" | "kube-public") {
            let why = format!("namespaces {name:?} is forbidden: this namespace may not be deleted");
            return Err(ApiError::new(403, "Forbidden", why));
        }
        let mut marked = (**existing).clone();
        if marked["metadata"]["deletionTimestamp"].is_null() {
            marked["metadata"]["deletionTimestamp"] = self.clock.timestamp().into();
        }
        marked["status"]["phase"] = "Terminating".into();
        let namespaces = self
            .resources
            .by_name("namespaces")
            .ok_or_else(ApiError::no_such_path)?
            .clone();
        if dry_run {
            return Ok(Deleted::Pending(Arc::new(marked)));
        }
        let marked = commit(inner, &namespaces, marked, false);
        for resource in self.resources.all() {
            for (namespace, object) in inner.snapshot(&resource.storage()).objects.into_keys() {
                if namespace == name {
                    let target = RequestTarget {
                        resource: resource.clone(),
                        namespace,
                        name: object,
                        subresource: String::new(),
                    };
                    self.delete_in(inner, &target, &DeleteOptions::default(), false)?;
                }
            }
        }
        end_namespace(inner, &name);
        let key = (String::new(), name);
        Ok(match inner.get("namespaces", &key) {
            Some(terminating) => Deleted::Pending(terminating),
            None => Deleted::Gone(marked),
        })
    }

    pub(crate) fn delete_collection(
        &self,
        target: &RequestTarget,
        selector: &ListSelector,
        options: &DeleteOptions,
        dry_run: bool,
    ) -> Result<Vec<Arc<Value>>, ApiError> {
        self.store.write(|inner| {
            let all = inner.snapshot(&target.resource.storage()).objects;
            let chosen = all.into_iter().filter(|((namespace, _), object)| {
                (target.namespace.is_empty() || *namespace == target.namespace) && selector.matches(object)
            });
            chosen
                .map(|((namespace, name), _)| {
                    let one = RequestTarget {
                        namespace,
                        name,
                        ..target.clone()
                    };
                    self.delete_in(inner, &one, options, dry_run).map(|deleted| match deleted {
                        Deleted::Gone(object) | Deleted::Pending(object) => object,
                    })
                })
                .collect()
        })
    }

    /// Handle `POST pods/NAME/binding` in one transaction on the pod (`BindingREST.Create`).
    pub(crate) fn bind(&self, target: &RequestTarget, binding: &Value, dry_run: bool) -> Result<Arc<Value>, ApiError> {
        let name = binding["metadata"]["name"].as_str().unwrap_or("");
        if name != target.name {
            return Err(ApiError::bad_request("name in URL does not match name in Binding object"));
        }
        let namespace = binding["metadata"]["namespace"].as_str().unwrap_or("");
        if !namespace.is_empty() && namespace != target.namespace {
            return Err(checks::wrong_namespace());
        }
        checks::metadata(&target.resource, binding)?;
        let node = pods::binding_target(binding)?;
        self.store.write(|inner| {
            let key = (target.namespace.clone(), target.name.clone());
            let pod = inner
                .get("pods", &key)
                .ok_or_else(|| ApiError::not_found("pods", &target.name))?;
            for (what, field) in [("UID", "uid"), ("ResourceVersion", "resourceVersion")] {
                let wanted = binding["metadata"][field].as_str().unwrap_or("");
                if !wanted.is_empty() && pod["metadata"][field] != *wanted {
                    return Err(precondition_failed(
                        &target.resource,
                        target,
                        what,
                        wanted,
                        &pod["metadata"][field],
                    ));
                }
            }
            let bound = pods::bind(&pod, binding, node, &self.clock.timestamp())?;
            Ok(commit(inner, &target.resource, bound, dry_run))
        })
    }

    /// Check the form that every object must have, set apiVersion and kind, and convert views into the stored form.
    fn check_body(&self, resource: &ServedResource, body: &mut Value, strict: bool) -> Result<(), ApiError> {
        if !body.is_object() {
            return Err(ApiError::bad_request(format!("{} must be a JSON object", resource.kind)));
        }
        let (version, kind) = (resource.api_version(), resource.kind.as_ref());
        for (field, wanted) in [("apiVersion", version.as_str()), ("kind", kind)] {
            let have = body[field].as_str().unwrap_or("");
            if !have.is_empty() && have != wanted {
                return Err(ApiError::bad_request(format!(
                    "the {} in the data ({have}) does not match the expected {} ({wanted})",
                    if field == "kind" { "kind" } else { "API version" },
                    if field == "kind" { "kind" } else { "API version" },
                )));
            }
            body[field] = wanted.into();
        }
        if body["metadata"].is_null() {
            body["metadata"] = json!({});
        }
        checks::metadata(resource, body)?;
        checks::types(resource, body, strict)?;
        if resource.is_events_k8s_io() {
            *body = events::to_storage(body);
        }
        Ok(())
    }
}

fn commit(inner: &mut StoreContent, resource: &ServedResource, object: Value, dry_run: bool) -> Arc<Value> {
    if dry_run {
        return Arc::new(object);
    }
    inner.put(&resource.storage(), object)
}

/// Remove an object, and its namespace if the namespace was waiting for that.
fn forget(inner: &mut StoreContent, resource: &ServedResource, key: &ObjectKey) -> Option<Arc<Value>> {
    let last = inner.remove(&resource.storage(), key);
    end_namespace(inner, &key.0);
    last
}

fn end_namespace(inner: &mut StoreContent, name: &str) {
    let key = (String::new(), name.to_owned());
    let terminating = inner
        .get("namespaces", &key)
        .is_some_and(|namespace| !namespace["metadata"]["deletionTimestamp"].is_null());
    if terminating && !inner.any_in_namespace(name) {
        inner.remove("namespaces", &key);
    }
}

fn precondition_failed(resource: &ServedResource, target: &RequestTarget, what: &str, wanted: &str, have: &Value) -> ApiError {
    let why = format!(
        "StorageError: invalid object, Code: 4, Key: /registry/{}/{}/{}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: \
         {what} in precondition: {wanted}, {what} in object meta: {}",
        resource.plural,
        target.namespace,
        target.name,
        have.as_str().unwrap_or("")
    );
    ApiError::conflict(&resource.qualified(), &target.name, &why)
}

/// Return the five characters that `generateName` appends (apiserver `pkg/storage/names`).
fn suffix(mut random: u64) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let base = ALPHABET.len() as u64;
    (0..5)
        .filter_map(|_| {
            let letter = ALPHABET.get(usize::try_from(random % base).ok()?)?;
            random /= base;
            Some(char::from(*letter))
        })
        .collect()
}
