//! Who asks, by the API server's word.

use std::time::Duration;

use axum::http::StatusCode;
use divvy_kube::in_words;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::Api;
use kube::api::PostParams;

use crate::desk::Refusal;

/// The API server's answer.
const ANSWER: Duration = Duration::from_secs(5);

/// A user whom the API server knows.
pub(crate) struct Caller<'a> {
    client: &'a kube::Client,
    user: UserInfo,
}

impl Caller<'_> {
    /// Has the API server look at a token. It takes those only that were made for itself.
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
                "the API server does not know the token, or it has ended",
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

    /// Whether the user may do that with pods. Empty: all namespaces, no name.
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
    tracing::warn!(%what, %why, "who asks, and for what, could not be found out");
    Err(Refusal::unavailable(format!(
        "the explainer could not find out who you are and what you may see ({what}): {why}"
    )))
}
