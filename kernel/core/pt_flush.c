// SPDX-License-Identifier: GPL-2.0
/*
 * Two ways to flush the TLBs of a process on all processors.
 *
 * flush_tlb_mm_range() is what the kernel itself uses; it is not exported, but may be found
 * (pt_symbol.h).
 *
 * Where that fails, or is not wanted (parameter flush=exported), the generation of the address
 * space is advanced and every processor that runs it flushes everything: what that needs is
 * exported. A processor that does not run it compares generations before it does.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/smp.h>
#include <linux/static_call.h>
#include <asm/tlbflush.h>

#include "core/pt_flush.h"
#include "core/pt_symbol.h"

static char *flush = "direct";
module_param(flush, charp, 0444);
MODULE_PARM_DESC(flush, "direct: the kernel's own way (default); exported: slower");

static void flush_this_processor(void *unused)
{
	preempt_disable();
	__flush_tlb_all();
	preempt_enable();
}

static void flush_exported(struct mm_struct *mm, unsigned long start, unsigned long end,
			   unsigned int stride_shift, bool freed_tables)
{
	/* Entries were cleared before; the generation must not be seen to advance before that. */
	smp_mb__before_atomic();
	atomic64_inc(&mm->context.tlb_gen);
	smp_mb__after_atomic(); /* advanced before it is seen which processors run it */
	on_each_cpu_cond_mask(NULL, flush_this_processor, NULL, true, mm_cpumask(mm));
}

DEFINE_STATIC_CALL(vellum_flush, flush_exported);

bool pt_flush_is_direct(void)
{
	return static_call_query(vellum_flush) != (void *)flush_exported;
}

int pt_flush_init(void)
{
	void *function;

	if (!strcmp(flush, "exported"))
		return 0;
	if (strcmp(flush, "direct")) {
		pr_err("flush=%s: there are direct and exported\n", flush);
		return -EINVAL;
	}
	function = pt_symbol_find("flush_tlb_mm_range");
	if (function)
		static_call_update(vellum_flush, function);
	else
		pr_warn("flush_tlb_mm_range is not to be found; TLBs are flushed the slower way\n");
	return 0;
}

void pt_flush_range(struct mm_struct *mm, unsigned long start, unsigned long end)
{
	static_call(vellum_flush)(mm, start, end, PAGE_SHIFT, false);
}

void pt_flush_huge(struct mm_struct *mm, unsigned long start)
{
	static_call(vellum_flush)(mm, start, start + PMD_SIZE, PMD_SHIFT, false);
}

void pt_flush_all(struct mm_struct *mm)
{
	pt_flush_range(mm, 0, TLB_FLUSH_ALL);
}

void pt_flush_tables(struct mm_struct *mm, unsigned long start, unsigned long end)
{
	static_call(vellum_flush)(mm, start, end, PAGE_SHIFT, true);
}
