//! Refuses query parameters that a call does not have. A caller that puts an option of the body
//! into the query would not notice that the option has no effect.
//!
//! In: the description of the API. Out: a problem document. What must hold: the description has
//! every query parameter that a call under `/v1` reads. Other paths, such as `/metrics`, ignore
//! unknown parameters.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{MatchedPath, Query, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use utoipa::openapi::path::{Operation, ParameterIn, PathItem};
use utoipa::openapi::{OpenApi, RefOr};

use crate::json::problem::{Answer, Kind, Problem};

/// The path of the description, which does not have itself.
pub(crate) const DESCRIPTION: &str = "/v1/openapi.json";

/// The names of the query parameters of each call, by method and path.
#[derive(Clone)]
pub(crate) struct KnownParameters(Arc<HashMap<(Method, String), Vec<String>>>);

impl KnownParameters {
    pub fn of(description: &OpenApi) -> Self {
        let mut known = HashMap::from([((Method::GET, DESCRIPTION.to_string()), Vec::new())]);
        for (path, item) in &description.paths.paths {
            if !path.starts_with("/v1") {
                continue;
            }
            for (method, call) in calls(item) {
                known.insert((method, path.clone()), names(call));
            }
        }
        KnownParameters(Arc::new(known))
    }

    fn of_call(&self, method: &Method, path: &str) -> Option<&Vec<String>> {
        let method = if method == Method::HEAD { &Method::GET } else { method };
        self.0.get(&(method.clone(), path.to_string()))
    }
}

fn calls(item: &PathItem) -> impl Iterator<Item = (Method, &Operation)> {
    let calls = [
        (Method::GET, &item.get),
        (Method::PUT, &item.put),
        (Method::POST, &item.post),
        (Method::DELETE, &item.delete),
        (Method::PATCH, &item.patch),
    ];
    calls.into_iter().filter_map(|(method, call)| Some((method, call.as_ref()?)))
}

/// Returns the names of a call's query parameters.
fn names(call: &Operation) -> Vec<String> {
    let parameters = call.parameters.iter().flatten();
    let of_query = parameters.filter_map(|parameter| match parameter {
        RefOr::T(parameter) if parameter.parameter_in == ParameterIn::Query => {
            Some(parameter.name.clone())
        }
        _ => None,
    });
    of_query.collect()
}

/// Refuses a call with a query parameter that it does not have.
pub(crate) async fn refuse_unknown(
    State(known): State<KnownParameters>,
    path: MatchedPath,
    request: Request,
    next: Next,
) -> Answer<Response> {
    if let Some(names) = known.of_call(request.method(), path.as_str())
        && request.uri().query().is_some()
    {
        let given = Query::<Vec<(String, String)>>::try_from_uri(request.uri());
        let Query(given) = given.map_err(|e| Problem::new(Kind::Malformed, e.body_text()))?;
        if let Some((name, _)) = given.iter().find(|(name, _)| !names.contains(name)) {
            return Err(Problem::new(Kind::Malformed, unknown(name, names)));
        }
    }
    Ok(next.run(request).await)
}

fn unknown(name: &str, known: &[String]) -> String {
    let known = match known {
        [] => "none: other options are in the body".into(),
        known => known.join(", "),
    };
    format!("query parameter {name:?}: this call has no such parameter; it has {known}")
}
