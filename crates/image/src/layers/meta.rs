//! State of an open image that reactors share, by format.

use std::sync::Arc;

use crate::{cow, qcow2};

/// State of an open image that reactors share, by format.
#[derive(Clone, Debug)]
pub(crate) enum Meta {
    Raw,
    Qcow2(Arc<qcow2::Shared>),
    Cow(Arc<cow::Shared>),
}
