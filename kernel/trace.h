/* SPDX-License-Identifier: GPL-2.0 */
/* Tracepoints: events/vellum in tracefs. A vector is one event; its entries are not events. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM vellum

#if !defined(VELLUM_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define VELLUM_TRACE_H

#include <linux/tracepoint.h>

DECLARE_EVENT_CLASS(exmap_ranges,
	TP_PROTO(unsigned int interface, unsigned int ranges, u64 pages),
	TP_ARGS(interface, ranges, pages),
	TP_STRUCT__entry(
		__field(unsigned int, interface)
		__field(unsigned int, ranges)
		__field(u64, pages)
	),
	TP_fast_assign(
		__entry->interface = interface;
		__entry->ranges = ranges;
		__entry->pages = pages;
	),
	TP_printk("interface=%u ranges=%u pages=%llu", __entry->interface, __entry->ranges,
		  __entry->pages)
);

DEFINE_EVENT(exmap_ranges, exmap_alloc,
	TP_PROTO(unsigned int interface, unsigned int ranges, u64 pages),
	TP_ARGS(interface, ranges, pages)
);

DEFINE_EVENT(exmap_ranges, exmap_free,
	TP_PROTO(unsigned int interface, unsigned int ranges, u64 pages),
	TP_ARGS(interface, ranges, pages)
);

TRACE_EVENT(exmap_transfer,
	TP_PROTO(unsigned int interface, u64 page, unsigned int pages, long outcome),
	TP_ARGS(interface, page, pages, outcome),
	TP_STRUCT__entry(
		__field(unsigned int, interface)
		__field(unsigned int, pages)
		__field(u64, page)
		__field(long, outcome)
	),
	TP_fast_assign(
		__entry->interface = interface;
		__entry->pages = pages;
		__entry->page = page;
		__entry->outcome = outcome;
	),
	TP_printk("interface=%u page=%llu pages=%u outcome=%ld", __entry->interface,
		  __entry->page, __entry->pages, __entry->outcome)
);

DECLARE_EVENT_CLASS(mount,
	TP_PROTO(unsigned long start, unsigned long end, unsigned int entries),
	TP_ARGS(start, end, entries),
	TP_STRUCT__entry(
		__field(unsigned long, start)
		__field(unsigned long, end)
		__field(unsigned int, entries)
	),
	TP_fast_assign(
		__entry->start = start;
		__entry->end = end;
		__entry->entries = entries;
	),
	TP_printk("start=%lx end=%lx entries=%u", __entry->start, __entry->end, __entry->entries)
);

DEFINE_EVENT(mount, mount_attach,
	TP_PROTO(unsigned long start, unsigned long end, unsigned int entries),
	TP_ARGS(start, end, entries)
);

DEFINE_EVENT(mount, mount_detach,
	TP_PROTO(unsigned long start, unsigned long end, unsigned int entries),
	TP_ARGS(start, end, entries)
);

DECLARE_EVENT_CLASS(huge,
	TP_PROTO(unsigned long address, u64 frame),
	TP_ARGS(address, frame),
	TP_STRUCT__entry(
		__field(unsigned long, address)
		__field(u64, frame)
	),
	TP_fast_assign(
		__entry->address = address;
		__entry->frame = frame;
	),
	TP_printk("address=%lx frame=%llx", __entry->address, __entry->frame)
);

DEFINE_EVENT(huge, huge_put,
	TP_PROTO(unsigned long address, u64 frame),
	TP_ARGS(address, frame)
);

DEFINE_EVENT(huge, huge_take_off,
	TP_PROTO(unsigned long address, u64 frame),
	TP_ARGS(address, frame)
);

DEFINE_EVENT(huge, huge_split,
	TP_PROTO(unsigned long address, u64 frame),
	TP_ARGS(address, frame)
);

#endif /* VELLUM_TRACE_H */

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
