//! Requests for a list, page by page, and the items of their responses as they arrive.

use std::marker::PhantomData;

use futures::io::{AsyncBufRead, AsyncBufReadExt as _};
use kube::api::ListParams;
use kube::core::Request;
use serde::de::DeserializeOwned;

use super::items::{Items, Take, Wrong};
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
pub(crate) struct Pages<T> {
    client: kube::Client,
    request: Request,
    params: ListParams,
    page: Option<Page>,
    item: PhantomData<fn() -> T>,
}

struct Page {
    body: Box<dyn AsyncBufRead + Send + Unpin>,
    items: Items,
}

impl<T: DeserializeOwned> Pages<T> {
    /// The list at a path such as `/api/v1/pods`. Nothing is sent yet.
    pub(crate) fn new(client: kube::Client, path: &str, params: ListParams) -> Pages<T> {
        Pages {
            client,
            request: Request::new(path),
            params,
            page: None,
            item: PhantomData,
        }
    }

    /// Reads what has arrived, and hands over the items that are complete.
    pub(crate) async fn read(&mut self, take: Take<'_, T>) -> Result<Progress, Failure> {
        let page = match &mut self.page {
            Some(page) => page,
            None => {
                let request = self.request.list(&self.params).map_err(kube::Error::BuildRequest)?;
                let body = self.client.request_stream(request).await?;
                self.page.insert(Page {
                    body: Box::new(Box::pin(body)),
                    items: Items::new(),
                })
            }
        };
        let chunk = page.body.fill_buf().await.map_err(Failure::Cut)?;
        let length = chunk.len();
        if length > 0 {
            page.items.read(chunk, take)?;
            page.body.consume_unpin(length);
            // A server may send faster than this reads; the other tasks of this thread must not wait for the whole list.
            tokio::task::yield_now().await;
            return Ok(Progress::More);
        }
        let ended = self
            .page
            .take()
            .map(|page| page.items.end(take))
            .transpose()?
            .unwrap_or_default();
        match ended.next.filter(|token| !token.is_empty()) {
            Some(token) => {
                self.params = std::mem::take(&mut self.params).continue_token(&token);
                Ok(Progress::More)
            }
            None => Ok(Progress::Complete(
                ended.resource_version.filter(|version| !version.is_empty()),
            )),
        }
    }
}
