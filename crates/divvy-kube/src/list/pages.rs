//! Requests a list page by page, and passes on the items of the responses as they arrive.

use futures::io::{AsyncBufRead, AsyncBufReadExt as _};
use kube::api::ListParams;
use kube::core::Request;

use super::items::{ListMeta, ListParser, Sink, Wrong};
use crate::in_words;

/// Why a list could not be read to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListFailure {
    /// The API server refused the request or could not be reached.
    #[error("{}", in_words(.0))]
    Api(#[from] kube::Error),
    /// The connection broke during the response.
    #[error("the answer could not be read to its end: {0}")]
    Cut(std::io::Error),
    /// The response is not a list.
    #[error(transparent)]
    Wrong(#[from] Wrong),
}

/// The progress of a list.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// More text or pages follow.
    More,
    /// The list is complete. The value is its resourceVersion, if it has one.
    Complete(Option<String>),
}

/// A list that is being read, over all its pages.
pub(crate) struct Pages {
    client: kube::Client,
    request: Request,
    params: ListParams,
    body: Option<Box<dyn AsyncBufRead + Send + Unpin>>,
    items: ListParser,
}

impl Pages {
    /// Prepare to read the list at a path such as `/api/v1/pods`. This sends nothing yet.
    pub(crate) fn new(client: kube::Client, path: &str, params: ListParams) -> Pages {
        Pages {
            client,
            request: Request::new(path),
            params,
            body: None,
            items: ListParser::new(),
        }
    }

    /// Read the next part of the response, and pass on the items that are complete.
    pub(crate) async fn read(&mut self, take: &mut (dyn Sink + Send)) -> Result<Progress, ListFailure> {
        if let Some(part) = self.part().await? {
            self.items.read(&part, take)?;
            // The server may send faster than this thread parses. Yield, so that other tasks do not wait for the whole list.
            tokio::task::yield_now().await;
            return Ok(Progress::More);
        }
        let ended = std::mem::replace(&mut self.items, ListParser::new()).end(take)?;
        Ok(self.turn(ended))
    }

    /// Return the next part of a page's text for the caller to parse; `None` at the end of the page.
    pub(crate) async fn part(&mut self) -> Result<Option<Vec<u8>>, ListFailure> {
        let body = match &mut self.body {
            Some(body) => body,
            None => {
                let request = self.request.list(&self.params).map_err(kube::Error::BuildRequest)?;
                let body = self.client.request_stream(request).await?;
                self.body.insert(Box::new(Box::pin(body)))
            }
        };
        let part = body.fill_buf().await.map_err(ListFailure::Cut)?.to_vec();
        if part.is_empty() {
            self.body = None;
            return Ok(None);
        }
        body.consume_unpin(part.len());
        Ok(Some(part))
    }

    /// Process the metadata of a page that has ended, and go on to the next page if there is one.
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
