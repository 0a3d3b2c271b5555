//! Completes the generated description of the API: every call may be refused, and the refusal is a
//! problem document (RFC 9457).

use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, Response};

use crate::json::problem::PROBLEM;

pub(crate) fn complete(mut description: OpenApi) -> OpenApi {
    description.paths.paths.values_mut().flat_map(operations).for_each(describe_refusals);
    description
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let PathItem { get, put, post, delete, patch, .. } = item;
    [get, put, post, delete, patch].into_iter().flatten()
}

fn describe_refusals(operation: &mut Operation) {
    let responses = &mut operation.responses.responses;
    for (status, response) in responses.iter_mut() {
        if let RefOr::T(response) = response
            && status.starts_with(['4', '5'])
            && let Some(content) = response.content.shift_remove("application/json")
        {
            response.content.insert(PROBLEM.into(), content);
        }
    }
    let mut refused = Response::new("The call is refused: `status` and `detail` say why.");
    let content = Content::new(Some(Ref::from_schema_name("Problem")));
    refused.content.insert(PROBLEM.into(), RefOr::T(content));
    responses.insert("default".into(), RefOr::T(refused));
}
