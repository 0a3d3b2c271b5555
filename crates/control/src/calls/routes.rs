//! The paths of the API. Each function is one call, with its part of the OpenAPI description.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware;
use axum::response::IntoResponse;
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use utoipa::OpenApi;
use utoipa::openapi::OpenApi as Description;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::description::complete;
use super::query::{DESCRIPTION, KnownParameters, refuse_unknown};
use crate::bounds::log::{self, FailedCalls};
use crate::events::stream as events;
use crate::json::body::{Body, Parameters};
use crate::json::keys::Keys;
use crate::json::problem::{Answer, Kind, Problem};
use crate::json::types::{
    Backup, ChangeQuery, Disconnect, Disconnected, Disk, Disks, Drain, Drained, Flushed, Fork, Job,
    JobRequest, Jobs, Reload, ReloadQuery, RemoveQuery, Removed, Resize, Resized, Resumed,
    ServerInfo, Snapshot, Upgrade, Upgraded,
};
use crate::metrics::scrape::{self, Scrapes};
use crate::operator::Operator;

/// Maximum number of threads that run calls. Two of them answer calls that do not block, and those
/// that end a drain. These block for 2 s at most.
pub(crate) const THREADS: usize = MAX_BLOCKING + MAX_LONG + MAX_BRIEF + 2;

/// Maximum number of calls that may block, without those that run for long.
const MAX_BLOCKING: usize = 6;

/// Maximum number of calls that run for long, mostly because the storage of a disk hangs.
const MAX_LONG: usize = 32;

/// Maximum number of calls that look at a disk and wait for no command of it.
const MAX_BRIEF: usize = 4;

/// Time between two looks at the clients that leave a disk.
const LOOK: Duration = Duration::from_millis(20);

/// A call that runs for this time leaves its place to calls for other disks.
const LONG: Duration = Duration::from_secs(1);

/// How long a call that may block waits for others to end.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone)]
struct Calls {
    operator: Arc<dyn Operator>,
    /// Places of calls that may block; see [`MAX_BLOCKING`].
    blocking: Arc<Semaphore>,
    /// Places of calls that run for long; see [`MAX_LONG`].
    long: Arc<Semaphore>,
    /// Places of calls that look at a disk; see [`MAX_BRIEF`].
    brief: Arc<Semaphore>,
}

impl Calls {
    /// Runs a call that does not block for long. It runs on another thread, because it locks.
    async fn quick<T: Send + 'static>(
        self,
        call: impl FnOnce(&dyn Operator) -> Answer<T> + Send + 'static,
    ) -> Answer<Json<T>> {
        self.run(call).await.map(Json)
    }

    async fn run<T: Send + 'static>(
        self,
        call: impl FnOnce(&dyn Operator) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        let done = tokio::task::spawn_blocking(move || call(&*self.operator)).await;
        done.unwrap_or_else(|_| Err(Problem::new(Kind::Busy, "the server is ending")))
    }

    /// Runs a call that waits for no command of a disk. It leaves the places of calls that may
    /// block to others.
    async fn brief<T: Send + 'static>(
        self,
        call: impl FnOnce(&dyn Operator) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        let free = self.brief.clone().acquire_owned();
        let Ok(Ok(permit)) = tokio::time::timeout(PATIENCE, free).await else {
            let detail = format!("{MAX_BRIEF} calls look at disks already: try again later");
            return Err(Problem::new(Kind::Busy, detail));
        };
        // The place is free when the call has ended, also if its client disconnects.
        let done = self.run(move |operator| {
            let done = call(operator);
            drop(permit);
            done
        });
        done.await
    }

    /// Runs a call that may block.
    async fn slow<T: Send + 'static>(
        self,
        call: impl FnOnce(&dyn Operator) -> Answer<T> + Send + 'static,
    ) -> Answer<Json<T>> {
        let free = self.blocking.clone().acquire_owned();
        let Ok(Ok(permit)) = tokio::time::timeout(PATIENCE, free).await else {
            let detail = format!("{MAX_BLOCKING} calls are under way already: try again later");
            return Err(Problem::new(Kind::Busy, detail));
        };
        let long = self.long.clone();
        // A task of its own, because the call goes on if its client disconnects.
        let done = tokio::spawn(async move {
            let mut running = pin!(self.quick(call));
            if let Ok(done) = tokio::time::timeout(LONG, &mut running).await {
                return done;
            }
            tokio::select! {
                done = &mut running => done,
                place = long.acquire_owned() => {
                    drop(permit);
                    let done = running.await;
                    drop(place);
                    done
                }
            }
        });
        done.await.unwrap_or_else(|_| Err(Problem::new(Kind::Busy, "the server is ending")))
    }
}

/// A part of the path.
struct At<T>(T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for At<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(At(value)),
            Err(e) => Err(Problem::new(Kind::Malformed, e.body_text())),
        }
    }
}

#[derive(OpenApi)]
#[openapi(info(title = "Blockyard", description = "Controls a Blockyard server."))]
struct Base;

/// Returns the calls and their description.
fn parts() -> (Router<Calls>, Description) {
    let (router, mut description) = OpenApiRouter::with_openapi(Base::openapi())
        .routes(routes!(server))
        .routes(routes!(disks, add))
        .routes(routes!(disk, remove, set))
        .routes(routes!(refresh))
        .routes(routes!(resize))
        .routes(routes!(flush))
        .routes(routes!(drain))
        .routes(routes!(resume))
        .routes(routes!(disconnect))
        .routes(routes!(snapshot))
        .routes(routes!(commit))
        .routes(routes!(stream))
        .routes(routes!(backup))
        .routes(routes!(fork))
        .routes(routes!(jobs))
        .routes(routes!(job, cancel))
        .routes(routes!(reload))
        .routes(routes!(upgrade))
        .split_for_parts();
    description.merge(scrape::parts().1);
    description.merge(events::parts().1);
    (router, complete(description))
}

/// Returns the OpenAPI description of the API.
pub fn description() -> Description {
    parts().1
}

/// Returns the service that answers all requests.
pub(crate) fn router(operator: Arc<dyn Operator>, scrapes: Scrapes) -> Router {
    let streams = events::parts().0.with_state(operator.events().clone());
    let places = [MAX_BLOCKING, MAX_LONG, MAX_BRIEF];
    let [blocking, long, brief] = places.map(|places| Arc::new(Semaphore::new(places)));
    let calls = Calls { operator, blocking, long, brief };
    let (router, description) = parts();
    let known = KnownParameters::of(&description);
    // Shared, because each request gets a clone of its handler.
    let description = Arc::new(description);
    let describe = move || async move { Json(&*description).into_response() };
    router
        .route(DESCRIPTION, axum::routing::get(describe))
        .with_state(calls)
        .merge(scrapes.router())
        .merge(streams)
        .route_layer(middleware::from_fn_with_state(known, refuse_unknown))
        .method_not_allowed_fallback(|request: Request| async move {
            let what = format!("{} has no method {}", request.uri().path(), request.method());
            Problem::new(Kind::Method, what)
        })
        .fallback(|request: Request| async move {
            let what = format!(
                "there is no path {}: /v1/openapi.json describes the API",
                request.uri().path()
            );
            Problem::new(Kind::NotFound, what)
        })
        .layer(middleware::from_fn_with_state(FailedCalls::default(), log::changes))
}

/// Returns what the server is.
#[utoipa::path(get, path = "/v1", responses((status = OK, body = ServerInfo)))]
async fn server(State(calls): State<Calls>) -> Answer<Json<ServerInfo>> {
    calls.quick(|operator| Ok(operator.server())).await
}

/// Lists the disks.
#[utoipa::path(get, path = "/v1/disks", responses((status = OK, body = Disks)))]
async fn disks(State(calls): State<Calls>) -> Answer<Json<Disks>> {
    calls.quick(|operator| Ok(Disks { disks: operator.disks() })).await
}

/// Shows a disk.
#[utoipa::path(get, path = "/v1/disks/{name}", params(("name" = String, Path)), responses(
    (status = OK, body = Disk), (status = NOT_FOUND, body = Problem)))]
async fn disk(State(calls): State<Calls>, At(name): At<String>) -> Answer<Json<Disk>> {
    calls.brief(move |operator| operator.disk(&name)).await.map(Json)
}

/// Adds a disk. The body has the keys of a `[[disk]]` table of the configuration file.
#[utoipa::path(post, path = "/v1/disks", params(ChangeQuery), request_body = Object, responses(
    (status = CREATED, body = Disk), (status = BAD_REQUEST, body = Problem),
    (status = CONFLICT, body = Problem), (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn add(
    State(calls): State<Calls>,
    Parameters(query): Parameters<ChangeQuery>,
    Body(keys): Body<Keys>,
) -> Answer<(StatusCode, Json<Disk>)> {
    let keys = keys.unique()?;
    let disk = calls.slow(move |operator| operator.add(keys, query.persist)).await?;
    Ok((StatusCode::CREATED, disk))
}

/// Removes a disk. Refuses while clients are connected, unless `force` is true.
#[utoipa::path(delete, path = "/v1/disks/{name}", params(("name" = String, Path), RemoveQuery),
    responses((status = OK, body = Removed), (status = NOT_FOUND, body = Problem),
        (status = CONFLICT, body = Problem)))]
async fn remove(
    State(calls): State<Calls>,
    At(name): At<String>,
    Parameters(query): Parameters<RemoveQuery>,
) -> Answer<Json<Removed>> {
    calls.slow(move |operator| operator.remove(&name, query.force, query.persist)).await
}

/// Changes weight, limits, reservations, latency target, `tls-allow`, `on-enospc` or `cache` of a
/// disk. Clients stay connected, except for `cache`: the disk is closed and opened again. Null
/// restores a default.
#[utoipa::path(patch, path = "/v1/disks/{name}", params(("name" = String, Path), ChangeQuery),
    request_body = Object, responses((status = OK, body = Disk),
        (status = BAD_REQUEST, body = Problem), (status = NOT_FOUND, body = Problem),
        (status = CONFLICT, body = Problem), (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn set(
    State(calls): State<Calls>,
    At(name): At<String>,
    Parameters(query): Parameters<ChangeQuery>,
    Body(keys): Body<Keys>,
) -> Answer<Json<Disk>> {
    let keys = keys.unique()?;
    calls.slow(move |operator| operator.set(&name, keys, query)).await
}

/// Adopts the present size of the image, and notifies clients.
#[utoipa::path(post, path = "/v1/disks/{name}/refresh", params(("name" = String, Path)),
    responses((status = OK, body = Resized), (status = NOT_FOUND, body = Problem),
        (status = CONFLICT, body = Problem), (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn refresh(State(calls): State<Calls>, At(name): At<String>) -> Answer<Json<Resized>> {
    calls.slow(move |operator| operator.refresh(&name)).await
}

/// Grows the image, and notifies clients.
#[utoipa::path(post, path = "/v1/disks/{name}/resize", params(("name" = String, Path)),
    request_body = Resize, responses(
        (status = OK, body = Resized), (status = BAD_REQUEST, body = Problem),
        (status = NOT_FOUND, body = Problem), (status = CONFLICT, body = Problem),
        (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn resize(
    State(calls): State<Calls>,
    At(name): At<String>,
    Body(size): Body<Resize>,
) -> Answer<Json<Resized>> {
    calls.slow(move |operator| operator.resize(&name, size)).await
}

/// Makes all answered writes durable.
#[utoipa::path(post, path = "/v1/disks/{name}/flush", params(("name" = String, Path)),
    responses((status = OK, body = Flushed), (status = NOT_FOUND, body = Problem),
        (status = CONFLICT, body = Problem), (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn flush(State(calls): State<Calls>, At(name): At<String>) -> Answer<Json<Flushed>> {
    calls.slow(move |operator| operator.flush(&name)).await
}

/// Waits until no request is in flight and all answered writes are durable. Holds requests from
/// then on, until the disk is resumed or the time has passed.
#[utoipa::path(post, path = "/v1/disks/{name}/drain", params(("name" = String, Path)),
    request_body = Drain, responses(
        (status = OK, body = Drained), (status = BAD_REQUEST, body = Problem),
        (status = NOT_FOUND, body = Problem), (status = CONFLICT, body = Problem),
        (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn drain(
    State(calls): State<Calls>,
    At(name): At<String>,
    Body(drain): Body<Drain>,
) -> Answer<Json<Drained>> {
    calls.slow(move |operator| operator.drain(&name, drain)).await
}

/// Disconnects one client of a disk, or all of them, after their requests are answered. They may
/// connect again.
#[utoipa::path(post, path = "/v1/disks/{name}/disconnect", params(("name" = String, Path)),
    request_body = Disconnect, responses(
        (status = OK, body = Disconnected), (status = BAD_REQUEST, body = Problem),
        (status = NOT_FOUND, body = Problem), (status = CONFLICT, body = Problem),
        (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn disconnect(
    State(calls): State<Calls>,
    At(name): At<String>,
    Body(clients): Body<Disconnect>,
) -> Answer<Json<Disconnected>> {
    let begun = calls.clone().brief(move |operator| operator.disconnect(&name, clients));
    let mut departure = begun.await?;
    // No thread waits: the clients of a disk that hangs stay for long.
    loop {
        let look = move |_: &dyn Operator| {
            let done = departure();
            Ok((departure, done))
        };
        let (waits, done) = calls.clone().brief(look).await?;
        if let Some(answer) = done {
            return answer.map(Json);
        }
        departure = waits;
        tokio::time::sleep(LOOK).await;
    }
}

/// Ends a drain, and lets the requests that wait for space on the host try again.
#[utoipa::path(post, path = "/v1/disks/{name}/resume", params(("name" = String, Path)),
    responses((status = OK, body = Resumed), (status = NOT_FOUND, body = Problem)))]
async fn resume(State(calls): State<Calls>, At(name): At<String>) -> Answer<Json<Resumed>> {
    // Not among the calls that may block, because it ends what they wait for. It waits for the
    // thread of the drain, for 2 s at most.
    calls.quick(move |operator| operator.resume(&name)).await
}

/// Starts a snapshot: later writes go to a new overlay.
#[utoipa::path(post, path = "/v1/disks/{name}/snapshot", params(("name" = String, Path)),
    request_body = Snapshot, responses(
        (status = ACCEPTED, body = Job), (status = BAD_REQUEST, body = Problem),
        (status = NOT_FOUND, body = Problem), (status = CONFLICT, body = Problem),
        (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn snapshot(
    State(calls): State<Calls>,
    At(name): At<String>,
    Body(options): Body<Snapshot>,
) -> Answer<(StatusCode, Json<Job>)> {
    start(calls, name, JobRequest::Snapshot(options)).await
}

/// Starts a commit: copies the topmost image's data into its backing image.
#[utoipa::path(post, path = "/v1/disks/{name}/commit", params(("name" = String, Path)),
    responses((status = ACCEPTED, body = Job), (status = NOT_FOUND, body = Problem),
        (status = CONFLICT, body = Problem)))]
async fn commit(
    State(calls): State<Calls>,
    At(name): At<String>,
) -> Answer<(StatusCode, Json<Job>)> {
    start(calls, name, JobRequest::Commit).await
}

/// Starts a stream: copies the data of all backing images into the topmost one.
#[utoipa::path(post, path = "/v1/disks/{name}/stream", params(("name" = String, Path)),
    responses((status = ACCEPTED, body = Job), (status = NOT_FOUND, body = Problem),
        (status = CONFLICT, body = Problem)))]
async fn stream(
    State(calls): State<Calls>,
    At(name): At<String>,
) -> Answer<(StatusCode, Json<Job>)> {
    start(calls, name, JobRequest::Stream).await
}

/// Starts a backup: copies the disk, as it is at this moment, into a new image.
#[utoipa::path(post, path = "/v1/disks/{name}/backup", params(("name" = String, Path)),
    request_body = Backup, responses(
        (status = ACCEPTED, body = Job), (status = BAD_REQUEST, body = Problem),
        (status = NOT_FOUND, body = Problem), (status = CONFLICT, body = Problem),
        (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn backup(
    State(calls): State<Calls>,
    At(name): At<String>,
    Body(options): Body<Backup>,
) -> Answer<(StatusCode, Json<Job>)> {
    start(calls, name, JobRequest::Backup(options)).await
}

/// Takes a snapshot of a disk, and adds a second, writable disk that begins with the same content.
#[utoipa::path(post, path = "/v1/disks/{name}/fork", params(("name" = String, Path)),
    request_body = Fork, responses(
        (status = CREATED, body = Disk), (status = BAD_REQUEST, body = Problem),
        (status = NOT_FOUND, body = Problem), (status = CONFLICT, body = Problem),
        (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn fork(
    State(calls): State<Calls>,
    At(name): At<String>,
    Body(fork): Body<Fork>,
) -> Answer<(StatusCode, Json<Disk>)> {
    let disk = calls.slow(move |operator| operator.fork(&name, fork)).await?;
    Ok((StatusCode::CREATED, disk))
}

async fn start(calls: Calls, name: String, job: JobRequest) -> Answer<(StatusCode, Json<Job>)> {
    let job = calls.slow(move |operator| operator.start(&name, job)).await?;
    Ok((StatusCode::ACCEPTED, job))
}

/// Lists the running jobs, and the latest ones that have ended.
#[utoipa::path(get, path = "/v1/jobs", responses((status = OK, body = Jobs)))]
async fn jobs(State(calls): State<Calls>) -> Answer<Json<Jobs>> {
    calls.quick(|operator| Ok(Jobs { jobs: operator.jobs() })).await
}

/// Shows a job.
#[utoipa::path(get, path = "/v1/jobs/{number}", params(("number" = u64, Path)), responses(
    (status = OK, body = Job), (status = NOT_FOUND, body = Problem)))]
async fn job(State(calls): State<Calls>, At(number): At<u64>) -> Answer<Json<Job>> {
    calls
        .quick(move |operator| {
            let job = operator.jobs().into_iter().find(|job| job.number == number);
            job.ok_or_else(|| Problem::new(Kind::NotFound, format!("there is no job {number}")))
        })
        .await
}

/// Cancels a commit, stream or backup. The answer is the job, which may still run for a moment.
#[utoipa::path(delete, path = "/v1/jobs/{number}", params(("number" = u64, Path)), responses(
    (status = OK, body = Job), (status = NOT_FOUND, body = Problem)))]
async fn cancel(State(calls): State<Calls>, At(number): At<u64>) -> Answer<Json<Job>> {
    calls.quick(move |operator| operator.cancel(number)).await
}

/// Starts another server and hands all disks over to it. Clients stay connected. If the other
/// server fails, this one goes on.
#[utoipa::path(post, path = "/v1/upgrade", request_body = Upgrade, responses(
    (status = OK, body = Upgraded), (status = CONFLICT, body = Problem),
    (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn upgrade(
    State(calls): State<Calls>,
    Body(upgrade): Body<Upgrade>,
) -> Answer<Json<Upgraded>> {
    calls.slow(move |operator| operator.upgrade(upgrade.binary.map(PathBuf::from))).await
}

/// Reads the configuration file again. Applies it, unless `dry-run` is true.
#[utoipa::path(post, path = "/v1/reload", params(ReloadQuery), responses(
    (status = OK, body = Reload), (status = CONFLICT, body = Problem),
    (status = UNPROCESSABLE_ENTITY, body = Problem)))]
async fn reload(
    State(calls): State<Calls>,
    Parameters(query): Parameters<ReloadQuery>,
) -> Answer<Json<Reload>> {
    calls.slow(move |operator| operator.reload(query.dry_run)).await
}
