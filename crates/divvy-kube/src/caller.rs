//! Finds out who a user is and what the user may do, by requests to the API server.

use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::Api;
use kube::api::PostParams;

use crate::Error;

/// Timeout of a request to the API server.
const ANSWER: Duration = Duration::from_secs(5);

/// A user that the API server has authenticated.
#[derive(Debug)]
pub struct Caller {
    user: UserInfo,
}

impl Caller {
    /// Authenticate a token with a TokenReview. The API server only accepts tokens that were issued for itself. `None` if it does not accept the token.
    ///
    /// # Errors
    /// The API server did not answer, or refused the review.
    pub async fn of(client: &kube::Client, token: &str) -> Result<Option<Caller>, Error> {
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
        Ok(user.map(|user| Caller { user }))
    }

    /// Return the user's name.
    pub fn name(&self) -> &str {
        self.user.username.as_deref().unwrap_or_default()
    }

    /// Report whether the user may use a verb on a resource of the core group, such as `list` on `pods`. An empty namespace means all namespaces, and an
    /// empty name means all objects.
    ///
    /// # Errors
    /// The API server did not answer, or refused the review.
    pub async fn may(
        &self,
        client: &kube::Client,
        verb: &str,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> Result<bool, Error> {
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: self.user.username.clone(),
                uid: self.user.uid.clone(),
                groups: self.user.groups.clone(),
                extra: self.user.extra.clone(),
                resource_attributes: Some(ResourceAttributes {
                    verb: some(verb),
                    resource: some(resource),
                    version: some("v1"),
                    namespace: some(namespace),
                    name: some(name),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let api: Api<SubjectAccessReview> = Api::all(client.clone());
        let review = answered("SubjectAccessReview", api.create(&PostParams::default(), &review)).await?;
        Ok(review.status.is_some_and(|status| status.allowed))
    }
}

async fn answered<T>(what: &str, request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Error> {
    let what = format!("it could not be checked who you are and what you may see ({what})");
    let error = match tokio::time::timeout(ANSWER, request).await {
        Ok(Ok(review)) => return Ok(review),
        Ok(Err(error)) => Error::api(what, error),
        Err(_elapsed) => Error::Late {
            what,
            text: format!("the API server gave no answer within {ANSWER:?}"),
        },
    };
    tracing::warn!("{error}");
    Err(error)
}
