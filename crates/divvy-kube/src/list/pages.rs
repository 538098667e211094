//! Requests for a list, page by page, and the items of their responses as they arrive.

use futures::io::{AsyncBufRead, AsyncBufReadExt as _};
use kube::api::ListParams;
use kube::core::Request;

use super::items::{Items, ListMeta, Sink, Wrong};
use crate::in_words;

/// Why a list could not be read to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The API server refused, or could not be reached.
    #[error("{}", in_words(.0))]
    Api(#[from] kube::Error),
    /// The connection broke while the response arrived.
    #[error("the answer could not be read to its end: {0}")]
    Cut(std::io::Error),
    /// The response is no list.
    #[error(transparent)]
    Wrong(#[from] Wrong),
}

/// How far a list is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// There is more to come.
    More,
    /// It is complete, and this is its resourceVersion, if it has one.
    Complete(Option<String>),
}

/// A list that is being read.
pub(crate) struct Pages {
    client: kube::Client,
    request: Request,
    params: ListParams,
    body: Option<Box<dyn AsyncBufRead + Send + Unpin>>,
    items: Items,
}

impl Pages {
    /// The list at a path such as `/api/v1/pods`. Nothing is sent yet.
    pub(crate) fn new(client: kube::Client, path: &str, params: ListParams) -> Pages {
        Pages {
            client,
            request: Request::new(path),
            params,
            body: None,
            items: Items::new(),
        }
    }

    /// Reads what has arrived, and hands over the items that are complete.
    pub(crate) async fn read(&mut self, take: &mut (dyn Sink + Send)) -> Result<Progress, Failure> {
        if let Some(part) = self.part().await? {
            self.items.read(&part, take)?;
            // A server may send faster than this reads; the other tasks of this thread must not wait for the whole list.
            tokio::task::yield_now().await;
            return Ok(Progress::More);
        }
        let ended = std::mem::replace(&mut self.items, Items::new()).end(take)?;
        Ok(self.turn(ended))
    }

    /// What has arrived of a page, to be read by the caller; none at its end.
    pub(crate) async fn part(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        let body = match &mut self.body {
            Some(body) => body,
            None => {
                let request = self.request.list(&self.params).map_err(kube::Error::BuildRequest)?;
                let body = self.client.request_stream(request).await?;
                self.body.insert(Box::new(Box::pin(body)))
            }
        };
        let part = body.fill_buf().await.map_err(Failure::Cut)?.to_vec();
        if part.is_empty() {
            self.body = None;
            return Ok(None);
        }
        body.consume_unpin(part.len());
        Ok(Some(part))
    }

    /// A page has ended and said this of the list.
    pub(crate) fn turn(&mut self, ended: ListMeta) -> Progress {
        match ended.next.filter(|token| !token.is_empty()) {
            Some(token) => {
                self.params = std::mem::take(&mut self.params).continue_token(&token);
                Progress::More
            }
            None => Progress::Complete(ended.resource_version.filter(|version| !version.is_empty())),
        }
    }
}
