//! The routes: what each request gets.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use divvy_page::{NoAddress, PageAddress, SCRIPT, STYLE};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use tokio::sync::Semaphore;

use crate::answer::{self, says, see};
use crate::events::{EventsClient, follow};
use crate::session::{cookie, is_token, token};
use crate::{Gate, Hosts, PageHub, TokenRefusal};

/// The maximum number of streams at the same time.
const STREAMS: usize = 64;
/// The maximum size in bytes of the form with the token.
const FORM_BYTES: usize = 16 << 10;
/// When a client may try again, in seconds.
const AGAIN: &str = "10";

struct WebSite {
    hub: Arc<PageHub>,
    gate: Arc<dyn Gate>,
    hosts: Hosts,
    streams: Arc<Semaphore>,
}

type SiteState = State<Arc<WebSite>>;

/// Return the pages as a router.
pub fn router(hub: Arc<PageHub>, gate: Arc<dyn Gate>, hosts: Hosts) -> Router {
    let site = Arc::new(WebSite {
        hub,
        gate,
        hosts,
        streams: Arc::new(Semaphore::new(STREAMS)),
    });
    Router::new()
        .route("/style.css", get(|headers: HeaderMap| asset(headers, answer::CSS, STYLE)))
        .route("/script.js", get(|headers: HeaderMap| asset(headers, answer::SCRIPT, SCRIPT)))
        .route("/login", get(form).post(sign_in))
        .route("/logout", post(sign_out))
        .route("/events", get(events))
        .route("/", get(page))
        .route("/{*path}", get(page))
        .method_not_allowed_fallback(|headers: HeaderMap| async move {
            says(
                &headers,
                StatusCode::METHOD_NOT_ALLOWED,
                "Method not allowed",
                &["This address does not take such a request."],
                false,
            )
        })
        .layer(from_fn_with_state(site.clone(), outside))
        .with_state(site)
}

/// What holds for every request and every answer.
async fn outside(State(site): SiteState, request: Request, next: Next) -> Response {
    let response = if site.hosts.accept(request.uri(), request.headers()) {
        next.run(request).await
    } else {
        let text = "This server does not answer under the name in the address. Use one of the names that it was started with.";
        says(
            request.headers(),
            StatusCode::MISDIRECTED_REQUEST,
            "Another server",
            &[text],
            false,
        )
    };
    answer::protected(response)
}

async fn asset(headers: HeaderMap, kind: &'static str, text: &'static str) -> Response {
    answer::text(&headers, StatusCode::OK, kind, text.to_owned())
}

/// Return a page.
async fn page(State(site): SiteState, uri: Uri, headers: HeaderMap) -> Response {
    if let Some((token, rest)) = token_in(&uri) {
        return match site.check(Some(&token)).await {
            Ok(_) => with_cookie(see(&rest), Some(&token), &site),
            Err(refused) => site.refuse(&headers, &refused),
        };
    }
    if let Err(refused) = site.check(token(&headers, &site.hosts.cookie)).await {
        return site.refuse(&headers, &refused);
    }
    if !site.hub.has_scene() {
        let text = "The cluster is being read. That takes some seconds if it is large. The page loads again automatically.";
        let mut response = says(&headers, StatusCode::SERVICE_UNAVAILABLE, "Just a moment", &[text], false);
        response.headers_mut().insert(header::REFRESH, HeaderValue::from_static("2"));
        return later(response);
    }
    let text = uri.path_and_query().map_or("/", |text| text.as_str());
    let wrong = match PageAddress::parse(text) {
        Ok(address) => match site.hub.page(&address) {
            Some(page) => return answer::text(&headers, StatusCode::OK, answer::HTML, page),
            None => NoAddress::Unknown,
        },
        Err(wrong) => wrong,
    };
    match wrong {
        NoAddress::Unknown => says(
            &headers,
            StatusCode::NOT_FOUND,
            "Not found",
            &[
                "There is no such page. A node or a pod may be gone. All nodes are on the page of the cluster, which the name Divvy above links to.",
            ],
            false,
        ),
        NoAddress::Wrong(why) => says(
            &headers,
            StatusCode::BAD_REQUEST,
            "Wrong address",
            &[&why, "The page does not guess what was meant. Correct the address."],
            false,
        ),
    }
}

/// Return the token in a query, and the address without it.
fn token_in(uri: &Uri) -> Option<(String, String)> {
    let query = uri.query()?;
    let pairs = || form_urlencoded::parse(query.as_bytes());
    let (_, token) = pairs().find(|(key, _)| key == "token")?;
    let rest = pairs().filter(|(key, _)| key != "token");
    let rest = form_urlencoded::Serializer::new(String::new()).extend_pairs(rest).finish();
    // Two slashes at the beginning would be another server's name.
    let path = uri.path().trim_start_matches('/');
    let address = if rest.is_empty() {
        format!("/{path}")
    } else {
        format!("/{path}?{rest}")
    };
    Some((token.into_owned(), address))
}

async fn events(State(site): SiteState, uri: Uri, headers: HeaderMap) -> Response {
    let token = match site.check(token(&headers, &site.hosts.cookie)).await {
        Ok(token) => token,
        Err(refused) => return site.refuse(&headers, &refused),
    };
    let (mut at, mut list, mut since) = (None, String::new(), None);
    for (key, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
        match &*key {
            "at" => at = PageAddress::parse(&value).ok(),
            "list" => list = value.into_owned(),
            "since" => since = value.parse().ok(),
            _ => {}
        }
    }
    let Some(address) = at else {
        return says(
            &headers,
            StatusCode::BAD_REQUEST,
            "Wrong address",
            &["`at` is not the address of a page."],
            false,
        );
    };
    if let Some(last) = headers.get("last-event-id") {
        since = last.to_str().ok().and_then(|last| last.parse().ok());
    }
    let Ok(place) = site.streams.clone().try_acquire_owned() else {
        let text =
            format!("{STREAMS} pages are updated at the moment, which is the limit. The page is complete without updates.");
        return later(says(
            &headers,
            StatusCode::SERVICE_UNAVAILABLE,
            "Too many readers",
            &[&text],
            false,
        ));
    };
    follow(EventsClient {
        hub: site.hub.clone(),
        gate: site.gate.clone(),
        token: token.to_owned(),
        address,
        list,
        since,
        _place: place,
    })
}

async fn form(State(site): SiteState, headers: HeaderMap) -> Response {
    says(&headers, StatusCode::OK, "Sign in", &[site.gate.how()], true)
}

async fn sign_in(State(site): SiteState, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let headers = parts.headers;
    if let Some(refusal) = foreign(&headers) {
        return refusal;
    }
    let Ok(bytes) = to_bytes(body, FORM_BYTES).await else {
        let text = "The form is larger than 16 KiB, or it did not arrive completely.";
        return says(&headers, StatusCode::PAYLOAD_TOO_LARGE, "Too large", &[text], true);
    };
    let sent = form_urlencoded::parse(&bytes).find(|(key, _)| key == "token");
    let sent = sent.map(|(_, value)| value.trim().to_owned());
    match site.check(sent.as_deref()).await {
        Ok(token) => with_cookie(see("/"), Some(token), &site),
        Err(refused) => site.refuse(&headers, &refused),
    }
}

async fn sign_out(State(site): SiteState, headers: HeaderMap) -> Response {
    foreign(&headers).unwrap_or_else(|| with_cookie(see("/login"), None, &site))
}

/// Refuse a form that a page of another site sent. Browsers say where a request comes from.
fn foreign(headers: &HeaderMap) -> Option<Response> {
    let site = headers.get("sec-fetch-site")?;
    let own = site == "same-origin" || site == "none";
    (!own).then(|| {
        says(
            headers,
            StatusCode::FORBIDDEN,
            "Forbidden",
            &["The form was sent by a page of another site."],
            false,
        )
    })
}

fn with_cookie(mut response: Response, token: Option<&str>, site: &WebSite) -> Response {
    if let Some(cookie) = cookie(&site.hosts.cookie, token, site.hosts.tls) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}

fn later(mut response: Response<Body>) -> Response {
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, HeaderValue::from_static(AGAIN));
    response
}

impl WebSite {
    /// Check a token, and return it.
    async fn check<'t>(&self, token: Option<&'t str>) -> Result<&'t str, TokenRefusal> {
        let token = token.filter(|token| is_token(token)).ok_or(TokenRefusal::Unknown)?;
        self.gate.check(token).await.map(|()| token)
    }

    fn refuse(&self, headers: &HeaderMap, refused: &TokenRefusal) -> Response {
        let how = self.gate.how();
        match refused {
            TokenRefusal::Unknown => {
                let text = "These pages need a token. There is none in this request, or it has expired.";
                let mut response = says(headers, StatusCode::UNAUTHORIZED, "Sign in", &[text, how], true);
                response
                    .headers_mut()
                    .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                response
            }
            TokenRefusal::Forbidden { right } => {
                let text = format!("The token is valid, but its user may not see these pages. The missing right is: {right}.");
                says(headers, StatusCode::FORBIDDEN, "Forbidden", &[&text, how], true)
            }
            TokenRefusal::Unavailable { why } => later(says(
                headers,
                StatusCode::SERVICE_UNAVAILABLE,
                "Not available",
                &["The token could not be checked, so the page is not shown.", why],
                false,
            )),
        }
    }
}
