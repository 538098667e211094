//! The translation between HTTP and verbs, for requests and responses.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, Method, Request, StatusCode, header};
use serde_json::{Value, json};

use super::error::{ApiError, FieldError};
use super::faults::RequestFacts;
use super::proxy::Proxied;
use super::registry::{DeleteOptions, Deleted, PatchKind, WriteOptions};
use super::render::Rendering;
use super::resources::{ApiPath, RequestTarget};
use super::reviews::ReviewKind;
use super::rights::Attributes;
use super::selector::ListSelector;
use super::store::{StoreContent, StoreSnapshot};
use super::watch::{self, WatchRequest, WatchStart};
use super::{ApiServer, discovery};

/// Upstream's limit on request bodies, in bytes.
const BODY_LIMIT: usize = 3 * 1024 * 1024;

/// A marker on a response that must not be sent because the connection breaks instead.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dropped;

/// A parsed request.
struct ApiCall {
    target: RequestTarget,
    verb: &'static str,
    query: Query,
    rendering: Rendering,
    content_type: String,
    user_agent: String,
    body: Vec<u8>,
}

/// The decoded query parameters.
struct Query(Vec<(String, String)>);

impl Query {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Parse a boolean as Go's ParseBool does, for the values that clients send.
    fn is_true(&self, name: &str) -> bool {
        matches!(self.get(name), Some("true" | "1" | "True"))
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, ApiError> {
        match self.get(name) {
            None | Some("") => Ok(None),
            Some(text) => text
                .parse()
                .map(Some)
                .map_err(|_| ApiError::bad_request(format!("invalid {name}: {text:?} is not a number"))),
        }
    }
}

/// Handle a request of any path (the axum handler).
pub(crate) async fn handle(State(api): State<ApiServer>, request: Request<Body>) -> Response {
    match answer(&api, request).await {
        Ok(response) => response,
        Err(RequestRefusal::Status(error)) => {
            tracing::debug!(code = error.code, message = %error, "refused a request");
            status_response(&error)
        }
        Err(RequestRefusal::Dropped) => dropped(),
    }
}

enum RequestRefusal {
    Status(ApiError),
    Dropped,
}

impl From<ApiError> for RequestRefusal {
    fn from(error: ApiError) -> RequestRefusal {
        RequestRefusal::Status(error)
    }
}

/// Return the response for a broken connection. A user of the plain router sees it as 504; [`ApiServer::client`] and the port break the
/// connection.
fn dropped() -> Response {
    let mut response = status_response(&ApiError::new(
        504,
        "Timeout",
        "the connection was broken (a fault on request)",
    ));
    response.extensions_mut().insert(Dropped);
    response
}

async fn answer(api: &ApiServer, request: Request<Body>) -> Result<Response, RequestRefusal> {
    let (parts, body) = request.into_parts();
    if *api.faults().down.borrow() {
        return Err(RequestRefusal::Dropped);
    }
    let mut segments = decode_path(parts.uri.path())?;
    // kubectl sends no token over plain HTTP, so the kubeconfig has it in the server's path instead: `/t/<token>/api/v1/…`.
    let in_path = match api.options().token {
        Some(_) if segments.len() >= 2 && segments[0] == "t" => segments.drain(..2).nth(1),
        _ => None,
    };
    let names: Vec<&str> = segments.iter().map(String::as_str).collect();
    if matches!(names.as_slice(), ["healthz" | "livez" | "readyz", ..]) {
        return Ok(plain(StatusCode::OK, "text/plain; charset=utf-8", b"ok".to_vec()));
    }
    let user = authenticate(api, in_path.as_deref(), &parts.headers)?;
    if let Some(proxied) = Proxied::of(&names) {
        let attributes = Attributes {
            verb: Proxied::verb(&parts.method),
            group: "",
            plural: proxied.plural(),
            subresource: "proxy",
            namespace: &proxied.namespace,
            name: &proxied.id,
        };
        api.rights().check(&user, &attributes)?;
        return Ok(proxied.forward(api.endpoints(), Request::from_parts(parts, body)).await?);
    }
    if let (Some(review), &Method::POST) = (ReviewKind::of(&names), &parts.method) {
        let answer = review.answer(api, &user, &limited(body).await?)?;
        return Ok(json_response(StatusCode::CREATED, &answer));
    }
    let query = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&parts.uri)
        .map(|query| Query(query.0))
        .map_err(|why| ApiError::bad_request(format!("the query cannot be read: {why}")))?;
    let target = match api.registry().resources.resolve(&segments) {
        ApiPath::Resource(target) => target,
        ApiPath::Unknown => {
            let refusal = unserved(api, &segments);
            // `kubectl logs -f` repeats its request after each refusal indefinitely.
            if refusal.code == 501 && query.is_true("follow") {
                return Ok(plain(StatusCode::OK, "text/plain", format!("{refusal}\n").into_bytes()));
            }
            return Err(refusal.into());
        }
        ApiPath::Other if parts.method != Method::GET => return Err(ApiError::no_such_path().into()),
        ApiPath::Other => {
            let page = discovery::page(&api.registry().resources, &segments).ok_or_else(ApiError::no_such_path)?;
            return Ok(json_response(StatusCode::OK, &page));
        }
    };
    let verb = verb_of(&parts.method, &target, &query)?;
    let attributes = Attributes {
        verb,
        group: &target.resource.group,
        plural: &target.resource.plural,
        subresource: &target.subresource,
        namespace: &target.namespace,
        name: &target.name,
    };
    api.rights().check(&user, &attributes)?;
    let header = |name: header::HeaderName| parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or("");
    let facts = RequestFacts {
        verb,
        resource: match target.subresource.as_str() {
            "" => target.resource.qualified(),
            sub => format!("{}/{sub}", target.resource.qualified()),
        },
        namespace: target.namespace.clone(),
        name: target.name.clone(),
        user,
        user_agent: header(header::USER_AGENT).to_owned(),
    };
    let plan = api.faults().plan(&facts);
    if let Some(mut gone) = plan.hang {
        // The wait ends when the rule is dropped, which is an error here.
        while gone.changed().await.is_ok() {}
        return Err(RequestRefusal::Dropped);
    }
    if !plan.latency.is_zero() {
        tokio::time::sleep(plan.latency).await;
    }
    if plan.lose_request {
        return Err(RequestRefusal::Dropped);
    }
    if let Some(error) = plan.refuse {
        return Err(error.into());
    }
    let rendering = Rendering::choose(header(header::ACCEPT), query.get("includeObject"))?;
    let content_type = header(header::CONTENT_TYPE).to_owned();
    let body = limited(body).await?;
    let call = ApiCall {
        target,
        verb,
        query,
        rendering,
        content_type,
        user_agent: facts.user_agent,
        body,
    };
    let result = call.perform(api);
    if plan.lose_answer {
        return Err(RequestRefusal::Dropped);
    }
    Ok(result?)
}

async fn limited(body: Body) -> Result<Vec<u8>, ApiError> {
    let body = axum::body::to_bytes(body, BODY_LIMIT).await.map_err(|why| {
        let message = format!("Request entity too large or broken: limit is {BODY_LIMIT}: {why}");
        ApiError::new(413, "RequestEntityTooLarge", message)
    })?;
    Ok(body.into())
}

/// Return the error for a path without a resource. Requests to a container are not served, but their paths are valid.
fn unserved(api: &ApiServer, segments: &[String]) -> ApiError {
    let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
    match segments.as_slice() {
        [
            "api",
            "v1",
            "namespaces",
            namespace,
            "pods",
            pod,
            what @ ("log" | "exec" | "attach" | "portforward" | "ephemeralcontainers"),
        ] => match api.get("pods", namespace, pod) {
            Ok(_) => ApiError::simulated(pod, what),
            Err(error) => error,
        },
        _ => ApiError::no_such_path(),
    }
}

fn authenticate(api: &ApiServer, in_path: Option<&str>, headers: &HeaderMap) -> Result<String, ApiError> {
    let in_header = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "))
        .unwrap_or("");
    api.user_of(in_path.unwrap_or(in_header))
        .ok_or_else(|| ApiError::new(401, "Unauthorized", "Unauthorized"))
}

fn verb_of(method: &Method, target: &RequestTarget, query: &Query) -> Result<&'static str, ApiError> {
    let named = !target.name.is_empty();
    let verb = match (method.as_str(), target.subresource.as_str()) {
        ("GET", "") if query.is_true("watch") => "watch",
        ("GET", "") if !named => "list",
        ("GET", "" | "status") => "get",
        ("POST", "") if !named => "create",
        ("POST", sub) if !matches!(sub, "" | "status") => "create",
        ("PUT", "" | "status") if named => "update",
        ("PATCH", "" | "status") if named => "patch",
        ("DELETE", "") if named => "delete",
        ("DELETE", "") => "deletecollection",
        _ => return Err(ApiError::method_not_allowed()),
    };
    Ok(verb)
}

impl ApiCall {
    fn perform(&self, api: &ApiServer) -> Result<Response, ApiError> {
        let registry = api.registry();
        let resource = &*self.target.resource;
        let object =
            |code: StatusCode, object: &Value| json_response(code, &self.rendering.object(resource, object, &registry.clock));
        let written =
            |(stored, created): (Arc<Value>, bool)| object(if created { StatusCode::CREATED } else { StatusCode::OK }, &stored);
        match self.verb {
            "get" => Ok(object(StatusCode::OK, &*self.get(api)?)),
            "list" => self.list(api),
            "watch" => self.watch(api),
            "create" => self.create(api),
            "update" => Ok(written(registry.update(
                &self.target,
                self.json()?,
                &self.write_options()?,
            )?)),
            "patch" => {
                let (kind, options) = (self.patch_kind()?, self.write_options()?);
                if kind == PatchKind::Apply && self.query.get("fieldManager").is_none_or(str::is_empty) {
                    let why = [FieldError::required("fieldManager", "is required for apply patch")];
                    return Err(ApiError::invalid("meta.k8s.io", "PatchOptions", "", &why));
                }
                let result = registry.patch(&self.target, kind, &self.json()?, &options)?;
                Ok(written(result))
            }
            "delete" => {
                let options = self.delete_options()?;
                match registry.delete(&self.target, &options, self.dry_deletion()?)? {
                    Deleted::Gone(last) if !resource.is_core("pods") => {
                        let mut status = success(StatusCode::OK);
                        status["details"] = json!({"name": self.target.name, "group": resource.group, "kind": resource.plural, "uid": last["metadata"]["uid"]});
                        Ok(json_response(StatusCode::OK, &status))
                    }
                    Deleted::Gone(last) | Deleted::Pending(last) => Ok(object(StatusCode::OK, &last)),
                }
            }
            "deletecollection" => {
                let options = self.delete_options()?;
                let gone = registry.delete_collection(&self.target, &self.selector()?, &options, self.dry_deletion()?)?;
                let revision = registry.store.read(StoreContent::revision);
                let body = self.rendering.list(resource, &gone, revision, &registry.clock);
                Ok(plain(StatusCode::OK, "application/json", body))
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    fn json(&self) -> Result<Value, ApiError> {
        if self.content_type.contains("protobuf") || self.content_type.contains("cbor") {
            let why = format!(
                "this API server reads JSON bodies only, and was sent {}; with kubectl use `apply -f` or `create -f` in place of \
                 `create KIND`",
                self.content_type
            );
            return Err(ApiError::new(415, "UnsupportedMediaType", why));
        }
        serde_json::from_slice(&self.body).map_err(|why| {
            ApiError::bad_request(format!(
                "the body is not JSON ({why}); this API server reads no YAML (Content-Type was {:?})",
                self.content_type
            ))
        })
    }

    fn dry_run(&self) -> Result<bool, ApiError> {
        match self.query.get("dryRun") {
            None | Some("") => Ok(false),
            Some("All") => Ok(true),
            Some(other) => Err(ApiError::bad_request(format!(
                "Unsupported value: {other:?}: supported values: \"All\" (dryRun)"
            ))),
        }
    }

    /// Report whether a deletion is a dry run. Its body may also set `dryRun`.
    fn dry_deletion(&self) -> Result<bool, ApiError> {
        let body = if self.body.is_empty() { Value::Null } else { self.json()? };
        Ok(self.dry_run()?
            || body["dryRun"]
                .as_array()
                .is_some_and(|all| all.iter().any(|value| value == "All")))
    }

    /// Return the options of a write. `fieldValidation=Warn` is treated as `Ignore` because there are no warnings.
    fn write_options(&self) -> Result<WriteOptions, ApiError> {
        Ok(WriteOptions {
            dry_run: self.dry_run()?,
            strict: self.query.get("fieldValidation") == Some("Strict"),
            manager: match self.query.get("fieldManager") {
                None | Some("") => self.user_agent.split('/').next().unwrap_or_default().to_owned(),
                Some(manager) => manager.to_owned(),
            },
            force: self.query.is_true("force"),
        })
    }

    fn patch_kind(&self) -> Result<PatchKind, ApiError> {
        match self.content_type.split(';').next().unwrap_or("").trim() {
            "application/merge-patch+json" => Ok(PatchKind::Merge),
            "application/strategic-merge-patch+json" => Ok(PatchKind::Strategic),
            "application/json-patch+json" => Ok(PatchKind::Json),
            "application/apply-patch+yaml" => Ok(PatchKind::Apply),
            _ => Err(ApiError::new(
                415,
                "UnsupportedMediaType",
                "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, \
                 application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml",
            )),
        }
    }

    /// Read the delete options from the body, then from the query.
    fn delete_options(&self) -> Result<DeleteOptions, ApiError> {
        let body = if self.body.is_empty() { Value::Null } else { self.json()? };
        let text = |name: &str| body["preconditions"][name].as_str().map(str::to_owned);
        Ok(DeleteOptions {
            grace_period_s: match body["gracePeriodSeconds"].as_i64() {
                Some(seconds) => Some(seconds),
                None => self.query.number("gracePeriodSeconds")?,
            },
            uid: text("uid"),
            resource_version: text("resourceVersion"),
        })
    }

    fn selector(&self) -> Result<ListSelector, ApiError> {
        let mut fields = self.query.get("fieldSelector").unwrap_or("").to_owned();
        // A watch on the path of one object is a watch on the collection that selects the object's name.
        if !self.target.name.is_empty() {
            fields = format!("metadata.name={},{fields}", self.target.name);
        }
        ListSelector::parse(&self.target.resource, self.query.get("labelSelector").unwrap_or(""), &fields)
    }

    fn snapshot(&self, api: &ApiServer) -> StoreSnapshot {
        let storage = self.target.resource.storage();
        api.registry().store.read(|inner| inner.snapshot(&storage))
    }

    fn get(&self, api: &ApiServer) -> Result<Arc<Value>, ApiError> {
        let storage = self.target.resource.storage();
        let key = (self.target.namespace.clone(), self.target.name.clone());
        let store = &api.registry().store;
        let (found, revision) = store.read(|inner| (inner.get(&storage, &key), inner.revision()));
        self.not_in_future(revision)?;
        found.ok_or_else(|| ApiError::not_found(&self.target.resource.qualified(), &self.target.name))
    }

    fn not_in_future(&self, current: u64) -> Result<(), ApiError> {
        let asked: u64 = self.query.number("resourceVersion")?.unwrap_or(0);
        if asked > current {
            return Err(ApiError::revision_too_large(asked, current));
        }
        Ok(())
    }

    fn list(&self, api: &ApiServer) -> Result<Response, ApiError> {
        let selector = self.selector()?;
        if self.query.get("continue").is_some_and(|token| !token.is_empty()) {
            return Err(ApiError::bad_request(
                "continue key is not valid: this server answers every list whole",
            ));
        }
        let registry = api.registry();
        let snapshot = self.snapshot(api);
        self.not_in_future(snapshot.revision)?;
        if let Some(other) = self.query.get("resourceVersionMatch")
            && !matches!(other, "" | "NotOlderThan")
        {
            return Err(self.invalid_options("resourceVersionMatch", other, "this server knows NotOlderThan only"));
        }
        let namespace = &self.target.namespace;
        let items: Vec<Arc<Value>> = snapshot
            .objects
            .into_iter()
            .filter(|((have, _), object)| (namespace.is_empty() || have == namespace) && selector.matches(object))
            .map(|(_, object)| object)
            .collect();
        let body = self
            .rendering
            .list(&self.target.resource, &items, snapshot.revision, &registry.clock);
        Ok(plain(StatusCode::OK, "application/json", body))
    }

    fn invalid_options(&self, field: &str, value: &str, why: &str) -> ApiError {
        let error = FieldError::invalid(field, &Value::String(value.to_owned()), why);
        ApiError::invalid("meta.k8s.io", "ListOptions", "", &[error])
    }

    fn watch(&self, api: &ApiServer) -> Result<Response, ApiError> {
        let bookmarks = self.query.is_true("allowWatchBookmarks");
        let revision: u64 = self.query.number("resourceVersion")?.unwrap_or(0);
        for (name, why) in [
            // An API server without streaming lists answers like this; clients then list.
            (
                "sendInitialEvents",
                "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled",
            ),
            (
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            ),
        ] {
            if let Some(given) = self.query.get(name).filter(|given| !given.is_empty()) {
                return Err(self.invalid_options(name, given, why));
            }
        }
        let start = match revision {
            0 => WatchStart::Initial(self.snapshot(api)),
            _ => WatchStart::After(revision),
        };
        let timeout: Option<u64> = self.query.number("timeoutSeconds")?;
        let request = WatchRequest {
            target: self.target.clone(),
            selector: self.selector()?,
            rendering: self.rendering,
            start,
            bookmarks,
            timeout: timeout.filter(|seconds| *seconds > 0).map(Duration::from_secs),
        };
        let mut response = Response::new(watch::body(api, request));
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        Ok(response)
    }

    fn create(&self, api: &ApiServer) -> Result<Response, ApiError> {
        let (registry, body, dry_run) = (api.registry(), self.json()?, self.dry_run()?);
        let resource = &*self.target.resource;
        match self.target.subresource.as_str() {
            "binding" => registry.bind(&self.target, &body, dry_run).map(drop)?,
            "eviction" => {
                let options = &body["deleteOptions"];
                let text = |name: &str| options["preconditions"][name].as_str().map(str::to_owned);
                let options = DeleteOptions {
                    grace_period_s: options["gracePeriodSeconds"].as_i64(),
                    uid: text("uid"),
                    resource_version: text("resourceVersion"),
                };
                registry.delete(&self.target, &options, dry_run)?;
            }
            _ => {
                let stored = registry.create(&self.target, body, &self.write_options()?)?;
                let rendered = self.rendering.object(resource, &stored, &registry.clock);
                return Ok(json_response(StatusCode::CREATED, &rendered));
            }
        }
        Ok(json_response(StatusCode::CREATED, &success(StatusCode::CREATED)))
    }
}

fn success(code: StatusCode) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code.as_u16()})
}

fn plain(code: StatusCode, content_type: &'static str, body: Vec<u8>) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = code;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

fn json_response(code: StatusCode, value: &Value) -> Response {
    plain(code, "application/json", value.to_string().into_bytes())
}

fn status_response(error: &ApiError) -> Response {
    let code = StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    json_response(code, &error.to_status())
}

/// Split a path into percent-decoded segments, and omit empty ones.
fn decode_path(path: &str) -> Result<Vec<String>, ApiError> {
    path.split('/')
        .filter(|segment| !segment.is_empty())
        .map(|segment| {
            decode(segment).ok_or_else(|| ApiError::bad_request(format!("the path {path:?} is not percent-encoded UTF-8")))
        })
        .collect()
}

fn decode(segment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digit = |byte: u8| char::from(byte).to_digit(16);
            let (high, low) = (digit(rest.next()?)?, digit(rest.next()?)?);
            bytes.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}
