//! Bodies: those that are read whole, those that are passed on, and the memory that this takes.

use super::CacheStatus::{Hit, Miss};
use super::*;

const MAX_BODY: usize = 1000;

fn api(body: impl Fn() -> Vec<Piece> + Send + Sync + 'static) -> Api {
    let api = Api::new(move |_, _| {
        Ok(Response::builder().header("cache-control", "max-age=600").body(Script::of(body())).unwrap())
    });
    api.ruled(|rules| rules.max_body = MAX_BODY)
}

fn piece(byte: u8, length: usize) -> Piece {
    Piece::Data(Bytes::from(vec![byte; length]))
}

/// The body as its caller reads it, and its end.
async fn read(cache: &Cache<Paused>, api: &Api) -> (CacheStatus, Vec<u8>, Option<&'static str>) {
    let reply = cache.call(api, CallOptions::default(), get("/"), |options, request| api.answer(options, request));
    let (parts, mut body) = reply.await.unwrap().into_parts();
    let (mut read, mut end) = (Vec::new(), None);
    let hint = body.size_hint();
    while let Some(frame) = body.frame().await {
        match frame.map(Frame::into_data) {
            Ok(Ok(data)) => read.extend_from_slice(&data),
            Ok(Err(_)) => end = Some("trailers"),
            Err(error) => end = Some(error),
        }
    }
    assert!(hint.exact().is_none() || end.is_none(), "{hint:?} for a body that ends with {end:?}");
    let length = read.len() as u64;
    assert!(hint.lower() <= length && hint.upper().is_none_or(|upper| length <= upper), "{hint:?} for {length}");
    (*parts.extensions.get().unwrap(), read, end)
}

#[tokio::test(start_paused = true)]
async fn oversized_bodies_are_forwarded_whole_without_caching() {
    let cache = cache();
    let fits = api(|| vec![piece(b'a', 600), piece(b'b', 400)]);
    let whole = [vec![b'a'; 600], vec![b'b'; 400]].concat();
    assert_eq!(read(&cache, &fits).await, (Miss, whole.clone(), None));
    assert_eq!(read(&cache, &fits).await, (Hit, whole.clone(), None));

    let cache = self::cache();
    let exceeds = api(|| vec![piece(b'a', 600), piece(b'b', 401), piece(b'c', 5000)]);
    let longer = [vec![b'a'; 600], vec![b'b'; 401], vec![b'c'; 5000]].concat();
    for _ in 0..2 {
        assert_eq!(read(&cache, &exceeds).await, (Miss, longer.clone(), None));
    }
    assert!(is_at_rest(&cache) && cache.size_bytes() == 0);
}

#[tokio::test(start_paused = true)]
async fn broken_bodies_and_trailers_are_forwarded_uncached() {
    let cache = cache();
    let breaks = api(|| vec![piece(b'a', 10), Piece::Break]);
    let trails = api(|| vec![piece(b'a', 10), Piece::Trailers]);
    for _ in 0..2 {
        assert_eq!(read(&cache, &breaks).await, (Miss, vec![b'a'; 10], Some("broken")));
        assert_eq!(read(&cache, &trails).await, (Miss, vec![b'a'; 10], Some("trailers")));
    }
    assert_eq!(cache.size_bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn bodies_shorter_than_content_length_are_not_cached() {
    let cache = cache();
    let api = Api::new(|_, _| Ok(reply(200, &[("cache-control", "max-age=60"), ("content-length", "10")], "short")));
    for _ in 0..2 {
        assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Miss);
    }
    let head = Api::new(|_, _| Ok(reply(200, &[("cache-control", "max-age=60"), ("content-length", "10")], "")));
    call(&cache, &head, request("HEAD", "/", &[])).await.unwrap();
    let got = call(&cache, &head, request("HEAD", "/", &[])).await.unwrap();
    assert_eq!((got.by, got.header("content-length")), (Hit, Some("10")));
}

#[tokio::test(start_paused = true)]
async fn a_pausing_body_is_streamed_before_its_end() {
    let clock = Paused::new();
    let cache = Cache::new(MIB, clock.clone());
    let hour = Duration::from_secs(3600);
    let api = api(move || vec![piece(b'a', 10), Piece::Pause(hour), piece(b'b', 10)]);
    let began = clock.now();
    let reply = cache.call(&api, CallOptions::default(), get("/"), |options, request| api.answer(options, request));
    let mut body = reply.await.unwrap().into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), vec![b'a'; 10]);
    assert_eq!(clock.now().since(began), Span::from_secs(1));
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), vec![b'b'; 10]);
    assert!(clock.now().since(began) >= Span::from_secs(3600));
    assert_eq!(cache.size_bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_is_forwarded_at_the_deadline() {
    let clock = Paused::new();
    let cache = Cache::new(MIB, clock.clone());
    let api = api(|| (0..40).flat_map(|_| [piece(b'a', 1), Piece::Pause(Duration::from_millis(900))]).collect());
    let began = clock.now();
    let reply = cache.call(&api, CallOptions::default(), get("/"), |options, request| api.answer(options, request));
    let body = reply.await.unwrap().into_body();
    assert_eq!(clock.now().since(began), Span::from_secs(10));
    assert_eq!(body.collect().await.unwrap().to_bytes(), vec![b'a'; 40]);
}

#[tokio::test(start_paused = true)]
async fn event_streams_are_forwarded_immediately() {
    let clock = Paused::new();
    let cache = Cache::new(MIB, clock.clone());
    let api = Api::new(|_, _| {
        let body = Script::of([piece(b'a', 1), Piece::Pause(Duration::from_millis(500)), piece(b'b', 1)]);
        let kind = "Text/Event-Stream; charset=utf-8";
        Ok(Response::builder().header("cache-control", "max-age=60").header("content-type", kind).body(body).unwrap())
    });
    let began = clock.now();
    let reply = cache.call(&api, CallOptions::default(), get("/"), |options, request| api.answer(options, request));
    let mut body = reply.await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(clock.now(), began);
}

#[tokio::test(start_paused = true)]
async fn many_large_replies_stay_within_the_cache_size() {
    const BODY: usize = 20_000;
    let cache = Cache::new(4 * MIB, Paused::new());
    let api = Api::new(|_, _| Ok(reply(200, &[("cache-control", "max-age=60")], vec![b'x'; BODY])));
    for index in 0..10_000 {
        call(&cache, &api, get(&format!("/{index}"))).await.unwrap();
        if index % 101 == 0 {
            let held: usize = cache.0.replies.iter().map(|(_, stored)| stored.size_bytes()).sum();
            assert!(held as u64 <= 4 * MIB && cache.size_bytes() <= 4 * MIB, "{held} bytes after {index}");
        }
    }
    assert_eq!(api.calls(), 10_000);
    let mut kept = 0;
    for index in 0..10_000 {
        let asked = request("GET", &format!("/{index}"), &[("cache-control", "only-if-cached")]);
        if call(&cache, &api, asked).await.unwrap().by == Hit {
            kept += 1;
        }
    }
    let most = 4 * MIB / BODY as u64;
    assert!(kept <= most && kept >= most * 9 / 10, "{kept} of {most} are kept");
}

#[tokio::test(start_paused = true)]
async fn bodies_being_read_count_towards_the_cache_size() {
    const BODY: usize = 100_000;
    let cache = Cache::new(MIB, Paused::new());
    let api = Api::new(|_, _| {
        let pieces = [piece(b'a', BODY / 2), Piece::Pause(Duration::from_millis(500)), piece(b'b', BODY / 2)];
        Ok(Response::builder().header("cache-control", "max-age=60").body(Script::of(pieces)).unwrap())
    });
    let most = &AtomicUsize::new(0);
    let calls = (0..100).map(|index| {
        let (cache, api) = (&cache, &api);
        async move {
            let got = call(cache, api, get(&format!("/{index}"))).await.unwrap();
            assert_eq!(got.body.len(), BODY);
        }
    });
    let watch = async {
        for _ in 0..9 {
            sleep(Duration::from_millis(100)).await;
            most.fetch_max(
                usize::try_from(cache.0.buffer_capacity.reserved.load(Ordering::Relaxed)).unwrap(),
                Ordering::SeqCst,
            );
        }
    };
    tokio::join!(for_each_at_once(calls), watch);
    let most = most.load(Ordering::SeqCst) as u64;
    assert!(most > MIB / 2 && most <= MIB, "{most} bytes at once");
    assert!(is_at_rest(&cache));
}
