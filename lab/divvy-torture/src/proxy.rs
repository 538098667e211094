//! What answers in the API server's place, or beside it: load balancers, ingress controllers, an API server that is starting.

use divvy_model::PodKey;

use crate::api::Verdict;

/// What becomes of a request whose answer is not the API server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// The API server carried it out.
    Done,
    /// It never came there.
    Never,
    /// It may be carried out later.
    Late,
}

/// An answer that is not the API server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    pub code: u16,
    /// `{pod}` stands for the name of the pod.
    body: &'static str,
    pub passed: Passed,
    /// An API server answers, but not the one of this cluster: a load balancer has backends of two clusters, or one was restored from an old
    /// backup. Its answer cannot be told from a right one.
    pub misleads: bool,
}

const fn page(code: u16, body: &'static str, passed: Passed) -> Page {
    Page {
        code,
        body,
        passed,
        misleads: false,
    }
}

const PAGES: [Page; 12] = [
    page(404, "404 page not found\n", Passed::Never),
    page(404, "<html><title>404 Not Found</title></html>", Passed::Never),
    page(
        404,
        r#"{"kind":"Status","apiVersion":"v1","status":"Failure","message":"the server could not find the requested resource","reason":"NotFound","details":{},"code":404}"#,
        Passed::Never,
    ),
    page(
        404,
        r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","details":{"na"#,
        Passed::Never,
    ),
    page(502, "<html><title>502 Bad Gateway</title></html>", Passed::Never),
    page(502, "<html><title>502 Bad Gateway</title></html>", Passed::Done),
    page(504, "", Passed::Late),
    page(200, "<html><title>Sign in</title></html>", Passed::Never),
    page(200, "<html><title>Sign in</title></html>", Passed::Done),
    page(
        201,
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Suc"#,
        Passed::Done,
    ),
    page(503, "upstream connect error", Passed::Late),
    Page {
        misleads: true,
        ..page(
            404,
            r#"{"kind":"Status","apiVersion":"v1","status":"Failure","message":"pods \"{pod}\" not found","reason":"NotFound","details":{"name":"{pod}","kind":"pods"},"code":404}"#,
            Passed::Never,
        )
    },
];

impl Page {
    /// The number of the page that misleads.
    pub const MISLEADING: u8 = 11;

    pub fn number(n: u8) -> Page {
        PAGES[usize::from(n) % PAGES.len()]
    }

    pub fn body(&self, pod: &PodKey) -> String {
        self.body.replace("{pod}", &pod.name)
    }
}

/// The API server's own answer to a Binding.
pub fn status(verdict: &Verdict, pod: &PodKey) -> (u16, String) {
    let failure = |code: u16, reason: &str, message: &str| {
        let body = format!(
            r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"{message}","reason":"{reason}","details":{{"name":"{}","kind":"pods"}},"code":{code}}}"#,
            pod.name
        );
        (code, body)
    };
    match verdict {
        Verdict::Created => (
            201,
            r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}"#.to_owned(),
        ),
        Verdict::Conflict(text) => failure(409, "Conflict", text),
        Verdict::NotFound => failure(404, "NotFound", &format!("pods \\\"{}\\\" not found", pod.name)),
    }
}
