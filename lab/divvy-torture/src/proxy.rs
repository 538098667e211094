//! Programs that answer instead of the API server: load balancers, ingress controllers, and an API server that is starting.

use divvy_model::PodKey;

use crate::api::BindingVerdict;

/// What happens to a request that the API server does not answer itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// The API server carried out the request.
    Done,
    /// The request never reached the API server.
    Never,
    /// The request may be carried out later.
    Late,
}

/// A response that does not come from the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyResponse {
    pub code: u16,
    /// The body, in which `{pod}` stands for the pod's name.
    body: &'static str,
    pub passed: Passed,
    /// Whether the response comes from the API server of another cluster, because the load balancer has backends of two clusters,
    /// or because one of the clusters was restored from an old backup. Such a response cannot be distinguished from a correct
    /// one.
    pub misleads: bool,
}

const fn page(code: u16, body: &'static str, passed: Passed) -> ProxyResponse {
    ProxyResponse {
        code,
        body,
        passed,
        misleads: false,
    }
}

const PAGES: [ProxyResponse; 12] = [
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
    ProxyResponse {
        misleads: true,
        ..page(
            404,
            r#"{"kind":"Status","apiVersion":"v1","status":"Failure","message":"pods \"{pod}\" not found","reason":"NotFound","details":{"name":"{pod}","kind":"pods"},"code":404}"#,
            Passed::Never,
        )
    },
];

impl ProxyResponse {
    /// The number of the page that comes from another cluster.
    pub const MISLEADING: u8 = 11;

    pub fn number(n: u8) -> ProxyResponse {
        PAGES[usize::from(n) % PAGES.len()]
    }

    pub fn body(&self, pod: &PodKey) -> String {
        self.body.replace("{pod}", &pod.name)
    }
}

/// Return the API server's own response to a Binding.
pub fn status(verdict: &BindingVerdict, pod: &PodKey) -> (u16, String) {
    let failure = |code: u16, reason: &str, message: &str| {
        let body = format!(
            r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"{message}","reason":"{reason}","details":{{"name":"{}","kind":"pods"}},"code":{code}}}"#,
            pod.name
        );
        (code, body)
    };
    match verdict {
        BindingVerdict::Created => (
            201,
            r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}"#.to_owned(),
        ),
        BindingVerdict::Conflict(text) => failure(409, "Conflict", text),
        BindingVerdict::NotFound => failure(404, "NotFound", &format!("pods \\\"{}\\\" not found", pod.name)),
    }
}
