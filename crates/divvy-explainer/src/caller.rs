//! Identifies the user and checks the user's rights, by requests to the API server.

use std::time::Duration;

use axum::http::StatusCode;
use divvy_kube::in_words;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::Api;
use kube::api::PostParams;

use crate::desk::Refusal;

/// Timeout of a request to the API server.
const ANSWER: Duration = Duration::from_secs(5);

/// A user that the API server has authenticated.
pub(crate) struct Caller<'a> {
    client: &'a kube::Client,
    user: UserInfo,
}

impl Caller<'_> {
    /// Authenticate a token with a TokenReview. The API server only accepts tokens that were issued for itself.
    pub(crate) async fn of<'a>(client: &'a kube::Client, token: &str) -> Result<Caller<'a>, Refusal> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let api: Api<TokenReview> = Api::all(client.clone());
        let status = answered("TokenReview", api.create(&PostParams::default(), &review))
            .await?
            .status
            .unwrap_or_default();
        let user = status.user.filter(|_| status.authenticated == Some(true));
        let user = user.filter(|user| user.username.as_deref().is_some_and(|name| !name.is_empty()));
        let refusal = || {
            Refusal::new(
                StatusCode::UNAUTHORIZED,
                "the API server does not accept the token; it may have expired",
            )
        };
        Ok(Caller {
            client,
            user: user.ok_or_else(refusal)?,
        })
    }

    pub(crate) fn name(&self) -> &str {
        self.user.username.as_deref().unwrap_or_default()
    }

    /// Report whether the user may use a verb on pods. An empty namespace means all namespaces, and an empty name means all pods.
    pub(crate) async fn may(&self, verb: &str, namespace: &str, name: &str) -> Result<bool, Refusal> {
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: self.user.username.clone(),
                uid: self.user.uid.clone(),
                groups: self.user.groups.clone(),
                extra: self.user.extra.clone(),
                resource_attributes: Some(ResourceAttributes {
                    verb: some(verb),
                    resource: some("pods"),
                    version: some("v1"),
                    namespace: some(namespace),
                    name: some(name),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let api: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let review = answered("SubjectAccessReview", api.create(&PostParams::default(), &review)).await?;
        Ok(review.status.is_some_and(|status| status.allowed))
    }
}

async fn answered<T>(what: &str, request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Refusal> {
    let why = match tokio::time::timeout(ANSWER, request).await {
        Ok(Ok(review)) => return Ok(review),
        Ok(Err(error)) => in_words(&error),
        Err(_elapsed) => format!("the API server gave no answer within {ANSWER:?}"),
    };
    tracing::warn!(%what, %why, "the user or the user's rights could not be checked");
    Err(Refusal::unavailable(format!(
        "the explainer could not check who you are and what you may see ({what}): {why}"
    )))
}
