//! Requests for pages: who gets which answer.

use std::io::Read as _;

use divvy_web::{Gate as _, Hosts, LocalToken, TokenRefusal};
use flate2::read::GzDecoder;
use http_body_util::BodyExt as _;
use proptest::prelude::*;

use crate::site::{HOST, Site, TOKEN, header, text};

const BEARER: (&str, &str) = ("authorization", "Bearer a-token");

#[tokio::test]
async fn only_a_valid_token_opens_a_page() {
    let site = Site::new();
    for (name, value, status) in [
        ("authorization", "Bearer a-token", 200),
        ("authorization", "bearer a-token", 200),
        ("cookie", "other=1; divvy-8080=a-token", 200),
        ("accept", "text/html", 401),
        ("authorization", "Bearer wrong", 401),
        ("authorization", "Bearer ", 401),
        ("authorization", "Basic a-token", 401),
        ("authorization", "Bearer a-token\u{e9}", 401),
        ("cookie", "divvy-8080=wrong", 401),
        ("cookie", "xdivvy-8080=a-token", 401),
        ("cookie", "divvy-8080=\"a-token\"", 401),
        ("cookie", "divvy-8081=a-token", 401),
        ("cookie", "divvy=a-token", 401),
    ] {
        for path in ["/", "/nodes/gpu-a100-01", "/waiting", "/nothing", "/events?at=/"] {
            let response = site.ask(path, &[(name, value)], None).await;
            let expected = match path {
                "/nothing" if status == 200 => 404,
                _ => status,
            };
            assert_eq!(response.status(), expected, "{path} with {name}: {value}");
            if status == 401 {
                assert_eq!(header(&response, "www-authenticate"), "Bearer");
                let page = text(response).await;
                assert!(
                    page.contains("Ask &lt;the administrator&gt;.") && page.contains("type=\"password\""),
                    "{page}"
                );
                assert!(!page.contains("gpu-a100"), "a refusal tells nothing of the cluster");
            }
        }
    }
    // The header decides if there is one.
    let both = [("authorization", "Bearer wrong"), ("cookie", "divvy-8080=a-token")];
    assert_eq!(site.ask("/", &both, None).await.status(), 401);
}

/// A gate that does not answer keeps the page closed.
#[tokio::test]
async fn a_missing_right_is_named() {
    let site = Site::new();
    let right = "list pods in all namespaces".to_owned();
    site.answers(Err(TokenRefusal::Forbidden { right }));
    let response = site.get("/").await;
    assert_eq!(response.status(), 403);
    let page = text(response).await;
    assert!(
        page.contains("list pods in all namespaces") && !page.contains("gpu-a100"),
        "{page}"
    );

    let why = "The API server gave no answer within 5 s.".to_owned();
    site.answers(Err(TokenRefusal::Unavailable { why }));
    for path in ["/", "/events?at=/", "/?token=a-token"] {
        let response = site.get(path).await;
        assert_eq!(
            (response.status().as_u16(), header(&response, "retry-after")),
            (503, "10"),
            "{path}"
        );
        let page = text(response).await;
        assert!(
            page.contains("gave no answer within 5 s") && !page.contains("gpu-a100"),
            "{page}"
        );
    }
}

#[tokio::test]
async fn every_answer_has_the_headers_that_protect_it() {
    let site = Site::new();
    for (path, headers, body) in [
        ("/", vec![BEARER], None),
        ("/", vec![], None),
        ("/", vec![("host", "evil.example")], None),
        ("/nothing", vec![BEARER], None),
        ("/?token=a-token", vec![], None),
        ("/events?at=/", vec![BEARER], None),
        ("/events", vec![BEARER], None),
        ("/style.css", vec![], None),
        ("/script.js", vec![], None),
        ("/login", vec![], None),
        ("/login", vec![], Some("token=wrong".to_owned())),
        ("/logout", vec![], Some(String::new())),
        ("/waiting", vec![], Some(String::new())),
    ] {
        let response = site.ask(path, &headers, body).await;
        let expected = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";
        assert_eq!(header(&response, "content-security-policy"), expected, "{path}");
        assert_eq!(header(&response, "x-content-type-options"), "nosniff", "{path}");
        assert_eq!(header(&response, "cache-control"), "no-store", "{path}");
        assert_eq!(header(&response, "referrer-policy"), "no-referrer", "{path}");
    }
}

#[tokio::test]
async fn a_host_name_of_someone_else_is_refused_before_anything_else() {
    let site = Site::new();
    for (host, status) in [
        (HOST, 200),
        ("localhost:8080", 200),
        ("LocalHost:8080", 200),
        ("[::1]:8080", 200),
        ("127.0.0.1", 421),
        ("127.0.0.1:8081", 421),
        ("evil.example", 421),
        ("evil.example:8080", 421),
        ("127.0.0.1:8080.evil.example", 421),
        ("", 421),
    ] {
        assert_eq!(
            site.ask("/", &[BEARER, ("host", host)], None).await.status(),
            status,
            "{host}"
        );
    }
    let twice = [BEARER, ("host", HOST), ("host", "evil.example")];
    assert_eq!(site.ask("/", &twice, None).await.status(), 421);

    let site = Site::under(Hosts::named(["Divvy.example.com".to_owned()]));
    for (host, status) in [
        ("divvy.example.com", 200),
        ("divvy.example.com:443", 200),
        ("example.com", 421),
        ("divvy.example.com:x", 421),
    ] {
        assert_eq!(
            site.ask("/", &[BEARER, ("host", host)], None).await.status(),
            status,
            "{host}"
        );
    }
}

#[tokio::test]
async fn a_token_moves_from_address_to_cookie() {
    let site = Site::new();
    for (path, to) in [
        ("/?token=a-token", "/"),
        ("/nodes/gpu-a?token=a-token", "/nodes/gpu-a"),
        ("/?namespace=ml&token=a-token&free=3", "/?namespace=ml&free=3"),
        // Not another server's address.
        ("//evil.example/?token=a-token", "/evil.example/"),
    ] {
        let response = site.ask(path, &[], None).await;
        assert_eq!(
            (response.status().as_u16(), header(&response, "location")),
            (303, to),
            "{path}"
        );
        assert_eq!(
            header(&response, "set-cookie"),
            "divvy-8080=a-token; Path=/; HttpOnly; SameSite=Strict",
            "{path}"
        );
    }
    // A browser reads a backslash as a slash, and leaves out control characters.
    for path in [
        r"/\evil.example/?token=a-token",
        r"/nodes\..?token=a-token",
        r"//\evil.example?token=a-token",
    ] {
        let response = site.ask(path, &[], None).await;
        assert_eq!(
            (response.status().as_u16(), header(&response, "location")),
            (400, ""),
            "{path}"
        );
    }
    for path in ["/?token=wrong", "/?token=", "/?token=a%0d%0ab", "/?token=a;b"] {
        let response = site.ask(path, &[], None).await;
        assert_eq!(
            (response.status().as_u16(), header(&response, "set-cookie")),
            (401, ""),
            "{path}"
        );
    }
    // Behind a name, the page is alone with its cookies.
    let site = Site::under(Hosts::named([HOST.to_owned()]).over_tls());
    let response = site.ask("/?token=a-token", &[], None).await;
    assert_eq!(
        header(&response, "set-cookie"),
        "divvy=a-token; Path=/; HttpOnly; SameSite=Strict; Secure"
    );
}

#[tokio::test]
async fn the_form_signs_in_and_out() {
    let site = Site::new();
    let response = site.ask("/login", &[], None).await;
    assert_eq!(response.status(), 200);
    let response = site
        .ask(
            "/login",
            &[("sec-fetch-site", "same-origin")],
            Some(" x=1&token=+a-token%0A".to_owned()),
        )
        .await;
    assert_eq!((response.status().as_u16(), header(&response, "location")), (303, "/"));
    let cookie = header(&response, "set-cookie")
        .split(';')
        .next()
        .expect("a cookie")
        .to_owned();
    assert_eq!(site.ask("/", &[("cookie", &cookie)], None).await.status(), 200);

    for (body, status) in [
        ("token=wrong".to_owned(), 401),
        (String::new(), 401),
        (format!("token={}", "x".repeat(16 << 10)), 413),
    ] {
        let response = site.ask("/login", &[], Some(body)).await;
        assert_eq!((response.status().as_u16(), header(&response, "set-cookie")), (status, ""));
    }
    let response = site.ask("/logout", &[("cookie", &cookie)], Some(String::new())).await;
    assert_eq!((response.status().as_u16(), header(&response, "location")), (303, "/login"));
    assert_eq!(
        header(&response, "set-cookie"),
        "divvy-8080=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"
    );
    // A form of another site does neither.
    for path in ["/login", "/logout"] {
        let response = site
            .ask(path, &[("sec-fetch-site", "cross-site")], Some(format!("token={TOKEN}")))
            .await;
        assert_eq!(
            (response.status().as_u16(), header(&response, "set-cookie")),
            (403, ""),
            "{path}"
        );
    }
}

#[tokio::test]
async fn what_is_asked_for_wrongly_has_an_answer_that_says_so() {
    let site = Site::new();
    for (path, status, says) in [
        ("/nodes/gone", 404, "may be gone"),
        ("/pods/ml/gone", 404, "may be gone"),
        ("/elsewhere", 404, "no such page"),
        ("/?free=x", 400, "free=&quot;x&quot; is not a whole number"),
        ("/events?at=nowhere", 400, "not the address of a page"),
    ] {
        let response = site.get(path).await;
        assert_eq!(response.status(), status, "{path}");
        let page = text(response).await;
        assert!(page.contains(says), "{page}");
    }
    assert_eq!(site.ask("/waiting", &[BEARER], Some(String::new())).await.status(), 405);
    assert_eq!(site.ask("/logout", &[BEARER], None).await.status(), 405);
}

#[tokio::test]
async fn an_answer_is_compressed_if_the_client_reads_that() {
    let site = Site::new();
    let plain = text(site.get("/").await).await;
    for (accepts, coding) in [
        ("gzip, br", "gzip"),
        ("br;q=1.0, GZIP;q=0.5", "gzip"),
        ("gzip;q=0", ""),
        ("identity", ""),
        ("gzipped", ""),
    ] {
        let response = site.ask("/", &[BEARER, ("accept-encoding", accepts)], None).await;
        assert_eq!(header(&response, "content-encoding"), coding, "{accepts}");
        assert_eq!(header(&response, "content-type"), "text/html; charset=utf-8");
        let bytes = response.into_body().collect().await.expect("a body").to_bytes();
        let mut page = String::new();
        match coding {
            "gzip" => drop(GzDecoder::new(&bytes[..]).read_to_string(&mut page).expect("gzip")),
            _ => page.push_str(std::str::from_utf8(&bytes).expect("text")),
        }
        assert_eq!(page, plain);
    }
}

#[tokio::test]
async fn style_and_script_need_no_token() {
    let site = Site::new();
    for (path, kind) in [
        ("/style.css", "text/css; charset=utf-8"),
        ("/script.js", "text/javascript; charset=utf-8"),
    ] {
        let response = site.ask(path, &[], None).await;
        assert_eq!((response.status().as_u16(), header(&response, "content-type")), (200, kind));
    }
}

#[tokio::test(start_paused = true)]
async fn the_nodes_of_a_page_are_wanted_for_a_minute() {
    let site = Site::new();
    site.get("/nodes/gpu-a100-01").await;
    tokio::time::advance(std::time::Duration::from_secs(30)).await;
    site.get("/pods/vision/legacy-tagger").await;
    assert_eq!(site.hub.wanted(), ["gpu-a100-01", "gpu-a30-01"].map(str::to_owned).into());
    tokio::time::advance(std::time::Duration::from_secs(31)).await;
    assert_eq!(site.hub.wanted(), ["gpu-a30-01".to_owned()].into());
    site.get("/").await;
    assert_eq!(site.hub.wanted().len(), 12);
    tokio::time::advance(std::time::Duration::from_secs(60)).await;
    assert!(site.hub.wanted().is_empty());
    // A client that is refused makes nothing wanted.
    site.ask("/", &[], None).await;
    assert!(site.hub.wanted().is_empty());
}

#[tokio::test]
async fn the_local_token_is_random_and_the_only_one() {
    let (one, other) = (LocalToken::random().expect("random"), LocalToken::random().expect("random"));
    assert_ne!(one.text(), other.text());
    assert_eq!(one.text().len(), 64);
    assert_eq!(one.check(one.text()).await, Ok(()));
    for wrong in [other.text(), "", &one.text()[..63], &format!("{}0", one.text())] {
        assert_eq!(one.check(wrong).await, Err(TokenRefusal::Unknown));
    }
    assert!(!format!("{one:?}").contains(one.text()));
}

proptest! {
    /// No request makes the server panic.
    #[test]
    fn no_request_opens_a_page_without_the_token(
        path in "/[ -~]{0,60}", cookie in "[ -~]{0,60}", host in prop_oneof![Just(HOST.to_owned()), "[ -~]{0,20}"],
    ) {
        let Ok(uri) = path.parse::<http::Uri>() else { return Ok(()) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let status = runtime.block_on(async {
            Site::new().ask(&uri.to_string(), &[("cookie", &cookie), ("host", &host)], None).await.status()
        });
        prop_assert!([401, 405, 421].contains(&status.as_u16()), "{path}: {status}");
    }
}

#[tokio::test]
async fn before_the_cluster_was_read_no_page_shows_an_empty_one() {
    let site = Site::unread();
    let response = site.ask("/", &[BEARER], None).await;
    assert_eq!(response.status(), 503);
    assert_eq!((header(&response, "refresh"), header(&response, "retry-after")), ("2", "10"));
    assert!(text(response).await.contains("The cluster is being read."));
}
